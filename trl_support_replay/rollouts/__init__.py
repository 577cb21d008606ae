"""The tokens of a generation batch with their supports: recorded, collected, or read from saved traces."""
