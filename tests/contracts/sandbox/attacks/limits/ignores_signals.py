"""Ignores every signal that can be ignored, and computes without end.

tests: stdio
"""

import contextlib
import signal

for number in signal.valid_signals():
    with contextlib.suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_IGN)
while True:
    pass
