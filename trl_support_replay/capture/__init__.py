"""Where supports are recorded: one module an engine, one recorder for all of them."""
