"""``python -m realsys`` is the command ``realsys``."""

import sys

from realsys.launch.cli import main

sys.exit(main())
