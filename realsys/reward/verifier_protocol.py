"""Messages between a VerifierPool and its processes: msgpack over a socket, each message behind its length.

pool ──VerifierBatch──> process   the items to verify; none: load the verifier
pool <───BatchDone───── process   the number of outcomes in the journal (below) so far
pool <────Loaded─────── process   the verifier is loaded
pool <───NotLoaded───── process   the verifier cannot be imported
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any

import msgspec

from realsys.errors import MALFORMED, RewardError
from realsys.reward.verifiers.contract import Item, Verdict

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


class NoVerdict(msgspec.Struct, array_like=True, tag="failure"):
    """Why an item has no verdict. ``cause``: one of CAUSES."""

    cause: str
    message: str


Outcome = Verdict | NoVerdict

#: Items are JSON inside of the msgpack: msgpack has no integers beyond 64 bits, and a dataset row may.
_encode_item = msgspec.json.Encoder().encode
decode_item = msgspec.json.Decoder(Item).decode


class VerifierBatch(msgspec.Struct, array_like=True):
    """Verify these with the verifier ``name``, in order; report at the latest every ``report_s`` seconds.

    ``check``: check the references of the items instead. ``arguments``: of the verifier, when it is loaded.
    """

    serial: int  # number of the batch for this process, from 1; the replies to it carry it
    name: str
    items: list[bytes]
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
    """The verifier is loaded. ``wrong_over_limit``: as it declares (``contract.declare``)."""

    serial: int
    wrong_over_limit: bool


class NotLoaded(msgspec.Struct, array_like=True, tag="not_loaded"):
    """The verifier cannot be imported or is none. The batch is over. ``spent`` as in BatchDone."""

    serial: int
    message: str
    spent: bool = False


Reply = BatchDone | Loaded | NotLoaded


def encoded(name: str, item: Item) -> bytes:
    """Encode an item for the verifier ``name``. Raises RewardError if it is not JSON."""
    try:
        return _encode_item(item)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise RewardError(f"an item for verifier {name} cannot be written as JSON: {error}") from None


def frame(message: msgspec.Struct | Outcome) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


# ---- journal: the outcomes of the present batch, in memory that both sides share
#
#     header  serial of the batch, end of the records in bytes
#     records LENGTH, msgpack of an Outcome; one for each item, in the order of the batch
#
# The process writes a record, then the header, and then begins the next item; that costs no system call. The memory
# outlives the process, so the pool knows which item ended it and keeps the outcomes before that.


_HEADER = struct.Struct("!II")
_OUTCOME: msgspec.msgpack.Decoder[Outcome] = msgspec.msgpack.Decoder(Outcome)  # type: ignore[arg-type]


class JournalWriter:
    """The journal inside of the verifier process. Takes over the file ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, MAX_REPLY)
        # A process that a verifier starts must not write outcomes: without these two lines, one that was forked would.
        self._memory.madvise(mmap.MADV_DONTFORK)
        os.close(descriptor)
        self._serial = 0
        self._end = _HEADER.size

    def begin(self, serial: int) -> None:
        """Begin a batch. The records of the one before are gone."""
        self._serial = serial
        self._end = _HEADER.size
        _HEADER.pack_into(self._memory, 0, serial, self._end)

    def append(self, record: bytes) -> None:
        """Add the framed outcome of the next item."""
        end = self._end + len(record)
        self._memory[self._end : end] = record
        self._end = end
        _HEADER.pack_into(self._memory, 0, self._serial, end)


class JournalReader:
    """The journal as the pool sees it. Nothing in it is trusted: a verifier may have damaged its process."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("realsys-verdicts")
        os.truncate(self.descriptor, MAX_REPLY)
        self._memory = mmap.mmap(self.descriptor, MAX_REPLY)
        self._serial = 0
        self._offset = _HEADER.size  # end of the records that were read
        self._count = 0  # records that were read

    def begin(self, serial: int) -> None:
        """Expect the batch ``serial``."""
        self._serial = serial
        self._offset = _HEADER.size
        self._count = 0

    def read(self, least: int, most: int) -> list[Outcome]:
        """Return the outcomes since the last call.

        Raises RewardError if one is malformed, or if the batch has fewer than ``least`` or more than ``most`` of them.
        """
        serial, end = _HEADER.unpack_from(self._memory)
        data = self._memory[self._offset : end] if serial == self._serial else b""
        outcomes: list[Outcome] = []
        at = 0
        try:
            while at < len(data):
                begin = at + LENGTH.size
                at = begin + LENGTH.unpack_from(data, at)[0]
                outcomes.append(_OUTCOME.decode(data[begin:at]))
        except (struct.error, *MALFORMED) as error:
            raise RewardError(f"the journal of a verifier process cannot be read: {error}") from error
        self._offset += at
        self._count += len(outcomes)
        if not least <= self._count <= most:
            problem = f"has {self._count} outcomes, must have {least} to {most}"
            raise RewardError(f"the journal of a verifier process {problem}")
        return outcomes

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)
