"""Attaches to other processes as a debugger.

tests: stdio
"""

import os


def gained(outside):
    ptrace, attach, seize = 101, 16, 0x4206
    others = {os.getppid(), 1, *outside.pids, *(int(name) for name in os.listdir("/proc") if name.isdigit())}
    for pid in others - {os.getpid(), 0}:
        for request in (attach, seize):
            if outside.syscall(ptrace, request, pid, 0, 0) == 0:
                return True
    return False
