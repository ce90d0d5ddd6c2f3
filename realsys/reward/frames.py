"""Messages between a VerifierPool and its processes: msgpack over a socket, each message behind its length.

pool ──Batch──> process       the items to verify; none: load the verifier
pool <──Done─── process       the number of outcomes in the journal (journal.py) so far
pool <─NotLoaded─ process     the verifier cannot be imported
"""

from __future__ import annotations

import struct

import msgspec

from realsys.reward.verifiers.base import Item, Verdict

LENGTH = struct.Struct("!I")
MAX_REPLY = 1 << 20  # bytes of one message, and of the journal
MAX_ITEMS = 64  # items of one batch; their outcomes are less than MAX_REPLY

#: A verdict, or the reason why there is none.
Outcome = Verdict | str

#: Items are JSON inside of the msgpack: msgpack has no integers beyond 64 bits, and a dataset row may.
encode_item = msgspec.json.Encoder().encode
decode_item = msgspec.json.Decoder(Item).decode


class Batch(msgspec.Struct, array_like=True):
    """Verify these with the verifier ``name``, in order; report at the latest every ``report_s`` seconds."""

    serial: int  # number of the batch for this process, from 1; the replies to it carry it
    name: str
    items: list[bytes]
    report_s: float


class Done(msgspec.Struct, array_like=True, tag="done"):
    """The journal holds ``count`` outcomes of the batch. 0: the process is up, or the verifier is loaded.

    ``spent``: the last item failed because the process lacks memory or another resource of the system. The batch is
    over, and the process must not be used any more.
    """

    serial: int
    count: int
    spent: bool = False


class NotLoaded(msgspec.Struct, array_like=True, tag="not_loaded"):
    """The verifier cannot be imported or is none. The batch is over. ``spent`` as in Done."""

    serial: int
    message: str
    spent: bool = False


Reply = Done | NotLoaded


def frame(message: msgspec.Struct | Outcome) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
