"""Has 24 processes that take 128 MB each.

tests: stdio
"""

import contextlib
import os
import signal

for _ in range(24):
    with contextlib.suppress(OSError):
        if os.fork() == 0:
            with contextlib.suppress(MemoryError):
                kept = b"x" * (128 << 20)
            signal.pause()
signal.pause()
