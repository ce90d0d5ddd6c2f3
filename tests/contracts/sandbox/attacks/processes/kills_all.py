"""Kills every process that it can signal, then its parent.

tests: stdio calls source
"""

import contextlib
import os
import signal

for pid in range(1, 1 << 15):
    if pid != os.getpid():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
with contextlib.suppress(OSError):
    os.kill(-1, signal.SIGKILL)
