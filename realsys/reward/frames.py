"""Messages between a VerifierPool and its processes: msgpack over a socket, each message behind its length.

pool ──Batch──> process       the items to verify; none: load the verifier
pool <──Done─── process       the number of outcomes in the journal (outcomes.py) so far
pool <──Loaded─── process     the verifier is loaded
pool <─NotLoaded─ process     the verifier cannot be imported
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from realsys.errors import RewardError
from realsys.reward.verifiers.base import Item, Verdict

LENGTH = struct.Struct("!I")
MAX_REPLY = 1 << 20  # bytes of one message, and of the journal
MAX_ITEMS = 64  # items of one batch; their outcomes are less than MAX_REPLY

#: Why a completion has no verdict. ``cpu_time``: for a verifier that declares so, such a completion is wrong instead.
CAUSES = (
    RAISED := "raised",  # the verifier raised
    NO_VERDICT := "no_verdict",  # it returned something else, such as NaN
    RESOURCES := "resources",  # it lacked memory, files, processes or disk
    CPU_TIME := "cpu_time",  # it reached rollout.reward.timeout_s
    ELAPSED := "elapsed",  # it hung: it reached rollout.reward.elapsed_timeout_s
    ENDPOINT := "endpoint",  # judge: its endpoint was busy, unreachable or refused the request
    DIED := "died",  # its process ended, or said something that cannot be read
    REFUSED := "refused",  # check_answer: the reference cannot be used
)


class Failure(msgspec.Struct, array_like=True, tag="failure"):
    """Why an item has no verdict. ``cause``: one of CAUSES."""

    cause: str
    message: str


Outcome = Verdict | Failure

#: Items are JSON inside of the msgpack: msgpack has no integers beyond 64 bits, and a dataset row may.
_encode_item = msgspec.json.Encoder().encode
decode_item = msgspec.json.Decoder(Item).decode


class Batch(msgspec.Struct, array_like=True):
    """Verify these with the verifier ``name``, in order; report at the latest every ``report_s`` seconds.

    ``check``: check the references of the items instead. ``arguments``: of the verifier, when it is loaded.
    """

    serial: int  # number of the batch for this process, from 1; the replies to it carry it
    name: str
    items: list[bytes]
    report_s: float
    check: bool = False
    arguments: dict[str, Any] = {}


class Done(msgspec.Struct, array_like=True, tag="done"):
    """The journal holds ``count`` outcomes of the batch. 0: the process is up.

    ``spent``: the last item failed because the process lacks memory or another resource of the system. The batch is
    over, and the process must not be used any more.
    """

    serial: int
    count: int
    spent: bool = False


class Loaded(msgspec.Struct, array_like=True, tag="loaded"):
    """The verifier is loaded. ``wrong_over_limit``: as it declares (``base.declare``)."""

    serial: int
    wrong_over_limit: bool


class NotLoaded(msgspec.Struct, array_like=True, tag="not_loaded"):
    """The verifier cannot be imported or is none. The batch is over. ``spent`` as in Done."""

    serial: int
    message: str
    spent: bool = False


Reply = Done | Loaded | NotLoaded


def encoded(name: str, item: Item) -> bytes:
    """Encode an item for the verifier ``name``. Raises RewardError if it is not JSON."""
    try:
        return _encode_item(item)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise RewardError(f"an item for verifier {name} cannot be written as JSON: {error}") from None


def frame(message: msgspec.Struct | Outcome) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
