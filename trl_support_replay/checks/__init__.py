"""Replayed beside recorded log-probs: the check, its evidence, the causes of a gap, and what is logged."""
