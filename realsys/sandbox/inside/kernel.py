"""System calls that Python does not offer: clone into namespaces, mount, capabilities, Landlock, seccomp."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct

from . import syscalls

# Functions are looked up here: in a child this would take longer than to call them.
_libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL: keeps the interpreter's lock, which a fork needs
_syscall, _mount, _prctl_call, _capset = _libc.syscall, _libc.mount, _libc.prctl, _libc.capset
_before_fork = ctypes.pythonapi.PyOS_BeforeFork
_after_fork_in_parent = ctypes.pythonapi.PyOS_AfterFork_Parent
_after_fork_in_child = ctypes.pythonapi.PyOS_AfterFork_Child

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
NAMESPACES = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC
ALL_NAMESPACES = NAMESPACES | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWNET

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION = 1
_FS_EXECUTE, _FS_WRITE_FILE, _FS_READ_FILE, _FS_READ_DIR = 1, 2, 4, 8
#: ABI -> bits of file access that it can restrict
_FS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
READ = _FS_EXECUTE | _FS_READ_FILE | _FS_READ_DIR
DEVICE = _FS_READ_FILE | _FS_WRITE_FILE
ALL = -1
_FILE_BITS = _FS_EXECUTE | _FS_WRITE_FILE | _FS_READ_FILE | 1 << 14 | 1 << 15  # what a rule for a file may grant


def fork_into(flags: int) -> int:
    """Fork into new namespaces. Returns as ``os.fork`` does. Raises OSError."""
    number = syscalls.number("clone")
    if not flags or number is None:
        return os.fork()
    _before_fork()
    pid = int(_syscall(number, flags | signal.SIGCHLD, 0, 0, 0, 0))
    code = ctypes.get_errno()
    if pid == 0:
        _after_fork_in_child()
        return 0
    _after_fork_in_parent()
    if pid < 0:
        raise OSError(code, f"clone: {os.strerror(code)}")
    return pid


def mount_tmpfs(folder: str, flags: int, options: str) -> None:
    """Mount an empty folder in memory. Raises OSError."""
    _check(_mount(b"tmpfs", folder.encode(), b"tmpfs", ctypes.c_ulong(flags), options.encode()), "mount", folder)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def set_dumpable(value: bool) -> None:
    """Allow or forbid other processes of this user to look into this one. Only an open one can map its user."""
    _prctl(_PR_SET_DUMPABLE, int(value))


def drop_privileges() -> None:
    """Give up all capabilities, for good: no program that is started gets any back. Raises OSError."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    with contextlib.suppress(OSError):
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("=Ii", 0x20080522, 0)
    _check(_capset(header, bytes(24)), "capset", "")


def landlock_abi() -> int:
    """Return the version of Landlock; 0 if this kernel has none."""
    return max(0, int(_syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(_LANDLOCK_VERSION))))


def ruleset(rules: dict[str, int]) -> int | None:
    """Return a descriptor of Landlock rules: path -> READ, DEVICE or ALL. None: not available. Raises OSError."""
    abi = landlock_abi()
    if not abi:
        return None
    every = (1 << _FS_BITS[min(abi, 5)]) - 1
    net = 3 if abi >= 4 else 0
    scoped = 3 if abi >= 6 else 0
    attributes = struct.pack("=QQQ", every, net, scoped)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    made = int(_syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)))
    _check(made, "landlock_create_ruleset", "")
    for path, wanted in rules.items():
        _add_rule(made, path, every if wanted == ALL else every & wanted)
    return made


def restrict(made: int) -> None:
    """Allow access to the paths of a ruleset only. Raises OSError."""
    _check(_syscall(_LANDLOCK_RESTRICT, made, ctypes.c_uint(0)), "landlock_restrict_self", "")
    os.close(made)


def _add_rule(made: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rule = struct.pack("=Qi", access if os.path.isdir(path) else access & _FILE_BITS, descriptor)
        _check(_syscall(_LANDLOCK_ADD, made, ctypes.c_uint(1), rule, ctypes.c_uint(0)), "landlock", path)
    finally:
        os.close(descriptor)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def seccomp(program: bytes) -> None:
    """Install a filter of system calls (``syscalls.filter_program``). Raises OSError."""
    loaded = _Program(len(program) // 8, program)
    _check(_prctl_call(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(loaded), 0, 0), "seccomp", "")


def _prctl(option: int, *arguments: int) -> None:
    values = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    _check(_prctl_call(option, *values), f"prctl({option})", "")


def _check(result: int, call: str, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call} {what}: {os.strerror(code)}")
