"""System calls that Python does not offer: clone into namespaces, mount, capabilities, Landlock, seccomp."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import signal
import struct

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
    clone = number("clone")
    if not flags or clone is None:
        return os.fork()
    _before_fork()
    pid = int(_syscall(clone, flags | signal.SIGCHLD, 0, 0, 0, 0))
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
    """Install a filter of system calls (``filter_program``). Raises OSError."""
    loaded = _Program(len(program) // 8, program)
    _check(_prctl_call(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(loaded), 0, 0), "seccomp", "")


def _prctl(option: int, *arguments: int) -> None:
    values = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    _check(_prctl_call(option, *values), f"prctl({option})", "")


def _check(result: int, call: str, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call} {what}: {os.strerror(code)}")


# ---- filter of system calls (seccomp): what a program may never ask of the kernel
#
# The kernel answers "not permitted" to a forbidden call, and "no such call" to calls that are newer than this table,
# so that libraries fall back to older ones. Calls of another architecture kill the process.


_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
NEWEST = 456  # calls beyond are unknown here


def _table(text: str) -> dict[str, tuple[int | None, ...]]:
    rows = (row.split() for row in text.split(", "))
    return {name: tuple(None if each == "-" else int(each) for each in numbers) for name, *numbers in rows}


#: name -> number on x86_64, number on aarch64; "-": does not exist there
_NUMBERS = _table(
    "clone 56 220, clone3 435 435, socketpair 53 199, mmap 9 222, "
    # network; setsockopt could enlarge the buffer of a socket, which no limit counts, to megabytes
    "socket 41 198, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242, "
    "setsockopt 54 208, "
    # other processes
    "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, pidfd_open 434 434, "
    "pidfd_getfd 438 438, pidfd_send_signal 424 424, process_madvise 440 440, process_mrelease 448 448, "
    "setsid 112 157, sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setattr 314 274, "
    "sched_setparam 142 118, ioprio_set 251 30, "
    # files and namespaces
    "mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, unshare 272 97, setns 308 268, "
    "open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, "
    "mount_setattr 442 442, name_to_handle_at 303 264, open_by_handle_at 304 265, fanotify_init 300 262, "
    "quotactl 179 60, quotactl_fd 443 443, acct 163 89, "
    # memory that no limit counts
    "memfd_create 319 279, memfd_secret 447 447, shmget 29 194, shmat 30 196, shmctl 31 195, msgget 68 186, "
    "semget 64 190, mq_open 240 180, move_pages 279 239, migrate_pages 256 238, mbind 237 235, "
    "set_mempolicy 238 237, "
    # things that are counted per user
    "inotify_init 253 -, inotify_init1 294 26, "
    # doors into the kernel
    "bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, "
    "io_uring_enter 426 426, io_uring_register 427 427, add_key 248 217, request_key 249 218, keyctl 250 219, "
    "kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273, "
    "delete_module 176 106, reboot 169 142, swapon 167 224, swapoff 168 225, syslog 103 116, "
    "settimeofday 164 170, clock_settime 227 112, adjtimex 159 171, clock_adjtime 305 266, "
    "sethostname 170 161, setdomainname 171 162, personality 135 92, lookup_dcookie 212 18, vhangup 153 58, "
    "iopl 172 -, ioperm 173 -, modify_ldt 154 -, uselib 134 -, ustat 136 -, sysfs 139 -"
)
_SPECIAL = {"clone", "clone3", "socketpair", "mmap"}

# BPF: struct sock_filter is (code, jump if true, jump if false, value)
_LOAD, _EQUAL, _GREATER, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
_FEW = 4  # calls that are compared one after another
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT, _FOURTH_ARGUMENT_AT = 0, 4, 16, 24, 40
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_AF_UNIX = 1
_NOT_STREAM = 0xE  # bits of the types of sockets; SOCK_STREAM has none of them
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20


def number(name: str) -> int | None:
    """Return the number of a call on this machine, or None."""
    column = _MACHINES.get(platform.machine())
    return None if column is None else _NUMBERS[name][column[0]]


def filter_program(namespaces: int) -> bytes | None:
    """Return the filter; None if this architecture is unknown. ``namespaces``: flags of clone to refuse."""
    if platform.machine() not in _MACHINES:
        return None
    _, architecture = _MACHINES[platform.machine()]
    forbidden = [value for name in _NUMBERS if name not in _SPECIAL and (value := number(name)) is not None]
    refuse, missing = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    steps = [
        _step(_LOAD, _ARCH_AT),
        _step(_EQUAL, architecture, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT),
        _step(_GREATER, NEWEST, 0, 1),  # also the x32 calls of x86_64
        _step(_RETURN, missing),
        _step(_EQUAL, number("clone3") or 0, 0, 1),
        _step(_RETURN, missing),
        _step(_EQUAL, number("clone") or 0, 0, 4),
        _step(_LOAD, _FIRST_ARGUMENT_AT),
        _step(_ANY_BIT, namespaces, 0, 1),
        _step(_RETURN, refuse),
        _step(_RETURN, _ALLOW),
        # asyncio and multiprocessing need pairs of streams. Datagrams take twice the memory, which no limit counts.
        _step(_EQUAL, number("socketpair") or 0, 0, 6),
        _step(_LOAD, _FIRST_ARGUMENT_AT),
        _step(_EQUAL, _AF_UNIX, 0, 2),
        _step(_LOAD, _SECOND_ARGUMENT_AT),
        _step(_ANY_BIT, _NOT_STREAM, 0, 1),
        _step(_RETURN, refuse),
        _step(_RETURN, _ALLOW),
        # Shared memory without a file: pages that a process gives back stay, and no count has them.
        _step(_EQUAL, number("mmap") or 0, 0, 5),
        _step(_LOAD, _FOURTH_ARGUMENT_AT),
        _step(_ANY_BIT, _MAP_ANONYMOUS, 0, 2),
        _step(_ANY_BIT, _MAP_SHARED, 0, 1),
        _step(_RETURN, refuse),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join([*steps, *_refusals(sorted(forbidden), refuse)])


def _refusals(numbers: list[int], refuse: int) -> list[bytes]:
    """Return steps that refuse these calls and allow others: a search by halves.

    When a filter is installed, for each program, the kernel tries all numbers of calls. One after another takes long.
    """
    if len(numbers) <= _FEW:
        steps = [_step(_EQUAL, value, len(numbers) - place, 0) for place, value in enumerate(numbers)]
        return [*steps, _step(_RETURN, _ALLOW), _step(_RETURN, refuse)]
    middle = len(numbers) // 2
    below = _refusals(numbers[:middle], refuse)
    return [_step(_AT_LEAST, numbers[middle], len(below), 0), *below, *_refusals(numbers[middle:], refuse)]


def _step(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, true, false, value)
