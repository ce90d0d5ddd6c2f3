"""Has 64 processes that take 256 MB each.

tests: stdio
"""

import contextlib
import os
import signal

for _ in range(64):
    with contextlib.suppress(OSError):
        if os.fork() == 0:
            with contextlib.suppress(MemoryError):
                kept = b"x" * (256 << 20)
            signal.pause()
signal.pause()
