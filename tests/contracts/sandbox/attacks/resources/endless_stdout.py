"""Writes to stdout without end, beginning with the right output.

tests: stdio
"""

import contextlib
import os

os.write(1, b"%d\n" % (2 * int(input())))
block = b"\n" * (1 << 16)
while True:
    with contextlib.suppress(OSError):
        os.write(1, block)
