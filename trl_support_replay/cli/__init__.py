"""The command `trl-support-replay`: one module per command, and what its commands are given."""
