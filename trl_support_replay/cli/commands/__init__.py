"""One module a command of `trl-support-replay`; see `cli`."""
