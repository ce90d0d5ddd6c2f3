"""Computes without end in 16 processes.

tests: stdio
"""

import contextlib
import os

for _ in range(4):
    with contextlib.suppress(OSError):
        os.fork()
while True:
    pass
