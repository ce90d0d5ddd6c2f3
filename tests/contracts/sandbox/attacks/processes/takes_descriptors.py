"""Takes descriptors of other processes: by pidfd_getfd, and by /proc/PID/fd.

tests: stdio
"""

import contextlib
import os


def gained(outside):
    pidfd_open, pidfd_getfd = 434, 438
    for pid in outside.others():
        pidfd = outside.syscall(pidfd_open, pid, 0)
        if pidfd >= 0 and any(outside.syscall(pidfd_getfd, pidfd, number, 0) >= 0 for number in range(32)):
            return True
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                os.close(os.open(f"/proc/{pid}/fd/{name}", os.O_RDONLY | os.O_NONBLOCK))
                return True
    return False
