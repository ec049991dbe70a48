"""`python -m functree` runs the command-line interface."""

import sys

from functree.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
