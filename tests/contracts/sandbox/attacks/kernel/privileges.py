"""Becomes another user, and takes capabilities back.

tests: stdio
"""

import contextlib
import os
import subprocess


def gained(outside):
    with open("/proc/self/status") as file:
        status = dict(line.strip().split(":\t", 1) for line in file if ":\t" in line)
    if int(status["CapEff"], 16) or int(status["CapPrm"], 16) or int(status["CapBnd"], 16):
        return True
    if status["NoNewPrivs"] != "1" or status["Seccomp"] == "0":
        return True
    user = os.getuid()
    with contextlib.suppress(OSError):
        os.setuid(0 if user else 1000)
        return os.getuid() != user
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["su", "-c", "true"], stdin=subprocess.DEVNULL, timeout=0.5).returncode == 0
    return False
