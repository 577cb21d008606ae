"""Saved traces under a model, without a trainer: scores and audits."""
