"""Becomes another user, and takes capabilities back.

tests: stdio
"""

import contextlib
import os
import subprocess


def gained(outside):
    prctl, get_no_new_privs, capget = 157, 39, 125
    if outside.syscall(prctl, get_no_new_privs, 0, 0, 0, 0) != 1:
        return True
    import ctypes

    capabilities = (ctypes.c_uint32 * 6)()
    outside.syscall(capget, (0x20080522).to_bytes(4, "little") + bytes(4), capabilities)
    if any(capabilities):
        return True
    user = os.getuid()
    with contextlib.suppress(OSError):
        os.setuid(0 if user else 1000)
        return os.getuid() != user
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["su", "-c", "true"], stdin=subprocess.DEVNULL, timeout=0.5).returncode == 0
    return False
