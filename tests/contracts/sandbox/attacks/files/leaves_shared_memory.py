"""Leaves System V shared memory, semaphores, messages and POSIX shared memory for the next program.

tests: stdio
runs: 2
"""

import contextlib
from multiprocessing import shared_memory


def gained(outside):
    shmget, semget, msgget, create = 29, 64, 68, 0o1000 | 0o600
    key = 0x7EA15
    found = outside.syscall(shmget, key, 4096, 0) >= 0
    found = found or outside.syscall(semget, key, 1, 0) >= 0
    found = found or outside.syscall(msgget, key, 0) >= 0
    outside.syscall(shmget, key, 4096, create)
    outside.syscall(semget, key, 1, create)
    outside.syscall(msgget, key, create)
    with contextlib.suppress(OSError, FileNotFoundError):
        shared_memory.SharedMemory(outside.mark)
        found = True
    with contextlib.suppress(OSError):
        shared_memory.SharedMemory(outside.mark, create=True, size=4096)
    return found
