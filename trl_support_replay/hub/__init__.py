"""Publishes a run: cards for models and traces, and their upload through `huggingface_hub`."""
