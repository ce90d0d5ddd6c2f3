"""Confines a process before it runs a program: identity, mounts, limits, capabilities, Landlock, system calls."""

from __future__ import annotations

import os
import resource
from typing import Any

from . import kernel

TMP, SHM = "/tmp", "/dev/shm"
USER = 1000  # id of the program in its user namespace
_MIB = 1 << 20
_STACK_BYTES = 64 * _MIB
#: folders of the sandbox, and access to all that is in them
_OWN = {"/etc": kernel.READ, "/dev": kernel.DEVICE, TMP: kernel.ALL, SHM: kernel.ALL}
_FILTER = kernel.filter_program(kernel.ALL_NAMESPACES)


def enter_namespaces(user: int, group: int) -> None:
    """Become USER of the new user namespace and lose all ids but one. Raises OSError."""
    kernel.set_dumpable(True)
    _write("/proc/self/uid_map", f"{USER} {user} 1")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/gid_map", f"{USER} {group} 1")
    kernel.set_dumpable(False)


def die_first() -> None:
    """Have the kernel end this process or its children, and none of the run, if the machine has no memory left."""
    _write("/proc/self/oom_score_adj", "1000")


def own_folders(disk_mb: int) -> None:
    """Mount an empty TMP and SHM, and hide /proc. Raises OSError."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    for folder in (TMP, SHM):
        kernel.mount_tmpfs(folder, flags, f"size={disk_mb}m,nr_inodes=10000,mode=0700,uid={USER},gid={USER}")
    kernel.mount_tmpfs("/proc", flags | kernel.MS_RDONLY | kernel.MS_NOEXEC, "size=4k,nr_inodes=2,mode=0555")


def limit(limits: dict[str, Any], *, namespaces: bool) -> None:
    """Set the limits of the process and of each that it starts."""
    memory, files = int(limits["memory_mb"] * _MIB), int(limits["file_mb"] * _MIB)
    bounds = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: int(limits["process_cpu_s"]) + 1,
        resource.RLIMIT_FSIZE: files,
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 1024,
        resource.RLIMIT_STACK: _STACK_BYTES,
    }
    if namespaces:  # elsewhere the kernel counts all processes of the user
        bounds[resource.RLIMIT_NPROC] = limits["processes"]
    if limits["bound_address_space"]:
        bounds[resource.RLIMIT_AS] = memory
    for which, wanted in bounds.items():
        _, most = resource.getrlimit(which)
        value = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(which, (value, value))


def give_up(readable: list[str]) -> None:
    """Drop capabilities, restrict files and system calls: from here on the process can undo nothing. Raises OSError."""
    kernel.drop_privileges()
    if (rules := kernel.ruleset(dict.fromkeys(readable, kernel.READ) | _OWN)) is not None:
        kernel.restrict(rules)
    if _FILTER is not None:
        kernel.seccomp(_FILTER)


def rehearse(readable: list[str]) -> None:
    """Do what ``give_up`` does, as far as it changes nothing for the zygote, which has no privileges."""
    kernel.drop_privileges()
    if (rules := kernel.ruleset(dict.fromkeys(readable, kernel.READ) | _OWN)) is not None:
        os.close(rules)


def has_filter() -> bool:
    """Return True if this module knows the system calls of this architecture."""
    return _FILTER is not None


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
