"""Doubles one block of memory until there is none.

tests: stdio
"""

import contextlib

block = b"x" * (1 << 20)
while True:
    with contextlib.suppress(MemoryError):
        block = block + block
