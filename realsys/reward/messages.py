"""What crosses the socket between a VerifierPool and its processes: msgpack, each message behind its length."""

from __future__ import annotations

import struct

import msgspec

LENGTH = struct.Struct("!I")
MAX_REPLY = 1 << 20  # bytes; a verdict is one byte


class Item(msgspec.Struct, array_like=True):
    """One answer to verify."""

    prompt: str
    answer: str
    reference: str


class Batch(msgspec.Struct, array_like=True):
    """Verify these with the verifier ``name``, in order; report at the latest every ``report_s`` seconds."""

    serial: int  # of this process, from 1; the replies to it carry it
    name: str
    items: list[Item]
    report_s: float


class Results(msgspec.Struct, array_like=True, tag="results"):
    """Verdicts on the next items of the batch; empty: the process is up (``serial`` 0), or the verifier is loaded."""

    serial: int
    verdicts: list[bool]


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The item after those reported, or loading the verifier (``loading``), raised. The batch is over.

    ``spent``: for want of memory or of something else of the system's, so the process is not to be used any more.
    """

    serial: int
    message: str
    verdicts: list[bool]  # on the items before it that were not reported yet
    loading: bool = False
    spent: bool = False


Reply = Results | Failed


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
