"""The demo: one small real model trained with replay and without, on the same prompts, side by side."""
