"""`python -m tfdist`: the command `tfdist`, where it is not on the path."""

import sys

from tfdist.launch.cli import main

sys.exit(main())
