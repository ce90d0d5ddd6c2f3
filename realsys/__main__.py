"""``python -m realsys`` is the command ``realsys``."""

import sys

from realsys.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
