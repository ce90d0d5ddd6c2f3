"""The journal of a verifier process: the outcomes of its present batch, in memory that both sides share.

    header  serial of the batch, end of the records in bytes
    records LENGTH, msgpack of an Outcome; one for each item, in the order of the batch

The process writes a record, then the header, and then begins the next item; that costs no system call. The memory
outlives the process, so the pool knows which item ended it and keeps the outcomes before that.
"""

from __future__ import annotations

import mmap
import os
import struct

import msgspec

from realsys.errors import MALFORMED, RewardError
from realsys.reward.frames import LENGTH, MAX_REPLY, Outcome

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
