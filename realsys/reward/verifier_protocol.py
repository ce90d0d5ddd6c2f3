"""Messages between a VerifierPool and its processes: lines of JSON over a socket, and a journal of outcomes.

pool ──VerifierBatch──> process   the items to verify; none: load the verifier
pool <───BatchDone───── process   the number of outcomes in the journal (below) so far
pool <────Loaded─────── process   the verifier is loaded, or cannot be
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import msgspec

from realsys.errors import MALFORMED, RewardError
from realsys.reward.verifiers.contract import Item, Verdict

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


class NoVerdict(msgspec.Struct, array_like=True, tag="failure"):
    """Why an item has no verdict. ``cause``: one of CAUSES."""

    cause: str
    message: str


Outcome = Verdict | NoVerdict


@dataclass(frozen=True, slots=True)
class VerifierWork:
    """Kind of work on an item: judge its completion with the verifier ``name``, or ``check`` its reference."""

    name: str
    check: bool = False


class VerifierBatch(msgspec.Struct, array_like=True):
    """Verify these with the verifier ``name``, in order; report at the latest every ``report_s`` seconds.

    ``check``: check the references of the items instead. ``arguments``: of the verifier, when it is loaded.
    """

    serial: int  # number of the batch for this process, from 1; the replies to it carry it
    name: str
    items: list[msgspec.Raw]  # each is decoded alone: one that cannot be read fails alone
    report_s: float
    check: bool = False
    arguments: dict[str, Any] = {}


class BatchDone(msgspec.Struct, array_like=True, tag="done"):
    """The journal holds ``count`` outcomes of the batch. 0: the process is up.

    ``spent``: the last item failed because the process lacks memory or another resource of the system. The batch is
    over, and the process must not be used any more.
    """

    serial: int
    count: int
    spent: bool = False


class Loaded(msgspec.Struct, array_like=True, tag="loaded"):
    """The verifier is loaded, unless there is a ``problem``; then ``spent`` is as in BatchDone.

    ``wrong_over_limit``: as the verifier declares (``contract.declare``).
    """

    serial: int
    problem: str = ""
    wrong_over_limit: bool = False
    spent: bool = False


Reply = BatchDone | Loaded
decode_item = msgspec.json.Decoder(Item).decode
_encode = msgspec.json.Encoder().encode


def encoded(name: str, item: Item) -> bytes:
    """Encode an item for the verifier ``name``. Raises RewardError if it is not JSON."""
    try:
        return _encode(item)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise RewardError(f"an item for verifier {name} cannot be written as JSON: {error}") from None


def line(message: msgspec.Struct | Outcome) -> bytes:
    """Return a message as one line."""
    return _encode(message) + b"\n"


# ---- journal: the outcomes of the present batch, as lines in memory that both sides share
#
# The process writes the outcome of an item before it begins the next one; that costs no system call, and works when a
# verifier has closed all descriptors. The memory outlives the process, so the pool knows which item ended it and keeps
# the outcomes before that.


_OUTCOMES: msgspec.json.Decoder[Outcome] = msgspec.json.Decoder(Outcome)  # type: ignore[arg-type]


class JournalWriter:
    """The journal inside of the verifier process. Takes over the file ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        self.end = 0  # 0: the next batch begins
        self._memory = mmap.mmap(descriptor, MAX_REPLY)
        # A process that a verifier starts must not write outcomes: without these two lines, one that was forked would.
        self._memory.madvise(mmap.MADV_DONTFORK)
        os.close(descriptor)

    def append(self, outcome: bytes) -> None:
        """Add the line of the next item."""
        begin, self.end = self.end, self.end + len(outcome)
        self._memory[begin : self.end] = outcome


class JournalReader:
    """The journal as the pool sees it. Nothing in it is trusted: a verifier may have damaged its process."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("realsys-verdicts")
        self.begin()
        self._memory = mmap.mmap(self.descriptor, MAX_REPLY)

    def begin(self) -> None:
        """Empty the journal for the next batch, while the process waits for it."""
        os.truncate(self.descriptor, 0)
        os.truncate(self.descriptor, MAX_REPLY)
        self._offset = self._count = 0  # bytes and outcomes that were read

    def read(self, least: int, most: int) -> list[Outcome]:
        """Return the outcomes since the last call.

        Raises RewardError if one is malformed, or if the batch has fewer than ``least`` or more than ``most`` of them.
        """
        written = self._memory[self._offset : self._memory.find(b"\0", self._offset)]
        lines = written[: written.rfind(b"\n") + 1]  # a process that was killed may leave a part of a line
        try:
            outcomes = _OUTCOMES.decode_lines(lines)
        except MALFORMED as error:
            raise RewardError(f"the journal of a verifier process cannot be read: {error}") from error
        self._offset += len(lines)
        self._count += len(outcomes)
        if not least <= self._count <= most:
            problem = f"has {self._count} outcomes, must have {least} to {most}"
            raise RewardError(f"the journal of a verifier process {problem}")
        return outcomes

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


# ---- the call of a reward service, JSON over HTTP
#
#     POST /verify {name, items, check}   200  a line with outcomes every PROGRESS_S while items are judged;
#                                              then the rest
#                                         503 with Retry-After  the service is full: a refusal for load, not an error
#     GET  /info                          ServiceInfo
#     GET  /metrics                       the same in Prometheus' text format
#
# Each item has its own outcome: a verdict, or the cause for which it has none. The lines also show that the
# service lives. An error is {"error": one line}.


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
