"""`python -m trl_support_replay`: the same as the command `trl-support-replay`."""

import sys

from .cli.main import main

sys.exit(main())
