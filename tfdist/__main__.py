"""`python -m tfdist`: the command `tfdist`, where it is not on the path."""

import sys

from tfdist.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
