"""Signals its process group and its session.

tests: stdio calls source
"""

import contextlib
import os
import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGKILL):
    with contextlib.suppress(OSError):
        os.killpg(os.getppid(), number)
    with contextlib.suppress(OSError):
        os.killpg(0, number)
