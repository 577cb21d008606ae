"""The bytes that the trainer's side and the server exchange."""
