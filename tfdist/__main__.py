"""Runs the command `tfdist` when it is started as `python -m tfdist`, for systems without `tfdist` on the path."""

import sys

from tfdist.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
