"""Ends with status 0 before the tests.

tests: stdio calls source
"""

import sys

sys.exit(0)
