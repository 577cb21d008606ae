"""What samples: one module per engine, for trainers and for the command `capture`."""
