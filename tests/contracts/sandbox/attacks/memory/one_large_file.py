"""Writes one file without end.

tests: stdio
"""

import contextlib
import signal

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
block = b"x" * (1 << 20)
with open("/tmp/fill", "wb") as file:
    while True:
        with contextlib.suppress(OSError):
            file.write(block)
