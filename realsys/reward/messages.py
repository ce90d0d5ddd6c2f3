"""What crosses the socket between a VerifierPool and its processes: msgpack, each message behind its length."""

from __future__ import annotations

import struct

import msgspec

LENGTH = struct.Struct("!I")
MAX_MESSAGE = 1 << 30  # bytes


class Item(msgspec.Struct, array_like=True):
    """One answer to verify."""

    prompt: str
    answer: str
    reference: str


class Batch(msgspec.Struct, array_like=True):
    """Verify these with the verifier ``name``, in order; report at the latest every ``report_s`` seconds."""

    name: str
    items: list[Item]
    report_s: float


class Results(msgspec.Struct, array_like=True, tag="results"):
    """Verdicts on the next items of the batch; empty: the process is up, or the verifier is loaded."""

    verdicts: list[bool]


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The item after those reported, or loading the verifier (``loading``), raised. The batch is over."""

    message: str
    verdicts: list[bool]  # on the items before it that were not reported yet
    loading: bool = False


Reply = Results | Failed


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
