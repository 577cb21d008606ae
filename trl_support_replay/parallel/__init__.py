"""Runs of several processes: errors that reach all of them, and policies split by tensor parallelism."""
