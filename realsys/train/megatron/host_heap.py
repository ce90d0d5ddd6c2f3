"""Returns freed host memory of a CPU rank to the system.

glibc keeps what a backward pass has freed, to give it out again. Between two steps a rank of a 135M model
so held 1.1 GB that servers and verifiers of the same host could not use.
"""

from __future__ import annotations

import ctypes

KEEP_BYTES = 256 << 20  # free memory that is not worth the time: small models stay below

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS.split())


def trim_heap(keep_bytes: int = KEEP_BYTES) -> bool:
    """Return free pages to the system if more than ``keep_bytes`` are free. Returns True if it did so.

    Does nothing with another C library than glibc 2.33 or newer.
    """
    libc = ctypes.CDLL(None)
    try:
        look, trim = libc.mallinfo2, libc.malloc_trim
    except AttributeError:
        return False
    look.restype = _Mallinfo2
    if look().fordblks <= keep_bytes:
        return False
    return bool(trim(ctypes.c_size_t(0)))
