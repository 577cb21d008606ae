"""One module per command of `trl-support-replay`; `cli/main.py` finds them."""
