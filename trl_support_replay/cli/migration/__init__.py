"""What support replay would do with a script or configuration written for TRL."""
