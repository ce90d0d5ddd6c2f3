"""Writes to stderr without end.

tests: stdio
"""

import contextlib
import os

block = b"error\n" * 10000
while True:
    with contextlib.suppress(OSError):
        os.write(2, block)
