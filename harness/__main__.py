"""`python -m harness COMMAND`: the same as the console script `verify-numba`."""

import sys

from harness.cli import main

sys.exit(main())
