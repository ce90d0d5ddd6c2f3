"""The call of a reward service, JSON over HTTP.

    POST /verify {name, items, check}   200  a line with outcomes every PROGRESS_S while items are judged;
                                             then the rest
                                        503 with Retry-After  the service is full: a refusal for load, not an error
    GET  /info                          ServiceInfo
    GET  /metrics                       the same in Prometheus' text format

Each item has its own outcome: a verdict, or the cause for which it has none. The lines also show that the
service lives. An error is {"error": one line}.
"""

from __future__ import annotations

import msgspec

from realsys.reward.verifier_protocol import NoVerdict
from realsys.reward.verifiers.contract import Verdict

PROGRESS_S = 2.0  # longest time without a line; a reply within this time is one piece
SILENCE_S = 15.0  # a service that sends nothing for this time is suspended, or cut off
CONNECT_S = 5.0
MAX_BODY = 256 << 20  # bytes of a request
MAX_ITEM = 255 << 20  # bytes of an encoded item


class VerifyRequest(msgspec.Struct):
    """Judge these items with the verifier ``name``; with ``check``, check their references instead.

    Items are encoded (``verifier_protocol.encoded``): the service hands them to its verifier processes as they are.
    """

    name: str
    items: list[msgspec.Raw]
    check: bool = False


class NoVerifier(msgspec.Struct, array_like=True, tag="no_verifier"):
    """The service cannot judge any item with this verifier (NoVerifierError)."""

    message: str


class Decided(msgspec.Struct, array_like=True):
    """End of one item. ``over_limit``: it is wrong because it reached the limit of CPU time."""

    index: int  # index of the item in the request
    outcome: Verdict | NoVerdict | NoVerifier
    over_limit: bool = False


class VerifyReply(msgspec.Struct):
    """Outcomes since the last line."""

    decided: list[Decided]


class ServiceInfo(msgspec.Struct):
    """State of a service."""

    held: int  # items that wait or are judged
    held_bytes: int
    waiting: int  # those that no process has taken yet
    verdicts: int  # since the start
    verdicts_per_s: float
    undecided: int  # judgements without a verdict, since the start
    restarts: int  # verifier processes that were replaced
    failures: dict[str, int]  # judgements by cause
    refused: dict[str, int]  # requests, by cause: token, size, load
