"""Computes for hours inside of one call of the C library, which no exception interrupts.

tests: stdio
"""

import re

re.match(r"(x+x+)+y", "x" * 64)
