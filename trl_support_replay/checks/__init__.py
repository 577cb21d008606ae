"""Compares replayed with recorded log-probs: the check, its evidence, causes of a gap, and metrics."""
