"""Changes limits, priority and processor of other processes.

tests: stdio
"""

import contextlib
import os
import resource


def gained(outside):
    for pid in outside.others():
        for change in (
            lambda pid=pid: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)),
            lambda pid=pid: os.setpriority(os.PRIO_PROCESS, pid, 19),
            lambda pid=pid: os.sched_setaffinity(pid, {0}),
            lambda pid=pid: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
        ):
            with contextlib.suppress(OSError):
                change()
                return True
    return False
