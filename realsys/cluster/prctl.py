"""The kernel's help against orphans: die with the parent, inherit orphaned descendants. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signum: int, parent: int | None) -> bool:
    """Have the kernel send ``signum`` to this process when the parent *thread* that started it ends.

    Returns False if process ``parent`` ended before this call: no signal will come. Raises OSError.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    return parent is None or os.getppid() == parent


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, so that it can find and kill them. Raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Be the subreaper inside the block; after it only if this process was one before."""
    before = ctypes.c_int()
    _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    become_subreaper()
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, before.value)


class _MemoryMap(ctypes.Structure):
    """``struct prctl_mm_map``."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in (
                *("start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack"),
                *("arg_start", "arg_end", "env_start", "env_end", "auxv"),
            )
        ),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_int32),
    )


_shown: list[ctypes.Array[ctypes.c_char]] = []  # the kernel reads this memory for /proc


def show_as(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Have /proc, and so ps and pgrep, show these words and this environment for this process.

    Without effect on a kernel that was built without checkpoint and restore.
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    memory = ctypes.create_string_buffer(words + variables, len(words) + len(variables))
    start = ctypes.addressof(memory)
    middle, end = start + len(words), start + len(memory)
    with open("/proc/self/stat", "rb") as file:
        fields = [b"", b"", b"", *file.read().rpartition(b")")[2].split()]  # numbered from 3, as in proc(5)
    code, data, heap, stack = (map(int, fields[a:b]) for a, b in ((26, 28), (45, 47), (47, 48), (28, 29)))
    _libc.sbrk.restype = ctypes.c_void_p
    places = _MemoryMap(*code, *data, *heap, _libc.sbrk(0), *stack, start, middle, middle, end, 0, 0, -1)
    if _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(places), ctypes.sizeof(places), 0) == 0:
        _shown[:] = [memory]
    _libc.prctl(_PR_SET_NAME, os.fsencode(os.path.basename(argv[0])), 0, 0, 0)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, int(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
