"""Raises its own priority above that of all others.

tests: stdio
"""

import contextlib
import os


def gained(outside):
    for change in (
        lambda: os.setpriority(os.PRIO_PROCESS, 0, -20),
        lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99)),
        lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)),
    ):
        with contextlib.suppress(OSError):
            change()
            return True
    return False
