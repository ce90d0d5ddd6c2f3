"""Computes in children that end after a moment and that nobody waits for, so that their time is not counted.

tests: stdio
"""

import contextlib
import os
import signal
import time

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    with contextlib.suppress(OSError):
        if os.fork() == 0:
            end = time.process_time() + 0.02
            while time.process_time() < end:
                pass
            os._exit(0)
