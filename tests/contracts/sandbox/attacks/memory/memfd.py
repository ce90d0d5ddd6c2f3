"""Fills memory files, which are in no folder.

tests: stdio
"""

import contextlib
import itertools
import os

block = b"x" * (1 << 20)
for number in itertools.count():
    with contextlib.suppress(OSError):
        descriptor = os.memfd_create(f"fill-{number}")
        for _ in range(64):
            os.write(descriptor, block)
