"""Makes namespaces of its own, in which it would be root.

tests: stdio
"""

import os


def gained(outside):
    unshare, clone, clone3, setns, sigchld = 272, 56, 435, 308, 17
    user, mount, network, pid = 0x10000000, 0x00020000, 0x40000000, 0x20000000
    for flags in (user, user | mount, user | network, mount, network, pid):
        if outside.syscall(unshare, flags) == 0:
            return True
        child = outside.syscall(clone, flags | sigchld, 0, 0, 0, 0)
        if child == 0:
            os._exit(0)
        if child > 0:
            return True
    for name in ("user", "mnt", "net", "pid"):
        for process in (1, os.getppid()):
            try:
                descriptor = os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY)
            except OSError:
                continue
            if outside.syscall(setns, descriptor, 0) == 0:
                return True
    import ctypes

    arguments = (ctypes.c_uint64 * 8)(user, 0, 0, 0, sigchld, 0, 0, 0)
    child = outside.syscall(clone3, arguments, 64)
    if child == 0:
        os._exit(0)
    return child > 0
