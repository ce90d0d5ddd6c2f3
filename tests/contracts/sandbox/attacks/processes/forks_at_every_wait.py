"""Has processes that fork and end again and again, so that a killer by number comes late.

tests: stdio
"""

import contextlib
import os

os.setsid() if os.getpid() != os.getpgid(0) else None
while True:
    with contextlib.suppress(OSError):
        if os.fork():
            os._exit(0)
