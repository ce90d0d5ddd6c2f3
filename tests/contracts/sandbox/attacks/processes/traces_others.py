"""Attaches to other processes as a debugger.

tests: stdio
"""


def gained(outside):
    ptrace, attach, seize = 101, 16, 0x4206
    for pid in outside.others():
        for request in (attach, seize):
            if outside.syscall(ptrace, request, pid, 0, 0) == 0:
                return True
    return False
