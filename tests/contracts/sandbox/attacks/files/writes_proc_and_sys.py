"""Writes to files of /proc and /sys that change the machine.

tests: stdio
"""

import contextlib
import os


def gained(outside):
    for file in (
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/hostname",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sys/net/ipv4/ip_forward",
        "/proc/sysrq-trigger",
        "/proc/1/oom_score_adj",
        "/sys/kernel/uevent_helper",
        "/sys/fs/cgroup/cgroup.procs",
        "/sys/power/state",
    ):
        with contextlib.suppress(OSError):
            os.close(os.open(file, os.O_WRONLY))
            if file != "/proc/1/oom_score_adj":  # pid 1 may be a process of the sandbox
                return True
    return False
