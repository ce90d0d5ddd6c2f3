"""The journal of one tenant: calls and results, durable before they are acknowledged or handed out.

    Called ──> Began ──> Answered      each call, in the order of seq_id
                         Checkpoint    after every K-th optimizer step, a load, and in a large journal

A restart starts the tenant from its last Checkpoint and repeats the answered calls after it that change its state;
calls without a result are carried out. After a checkpoint a large journal is compacted to what is still needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import msgspec

from realsys.cluster.journal import Compactor, Journal, read_journal
from realsys.serve.contract import Snapshot

_COMPACT_ABOVE = 64 << 20  # bytes; the requests of some calls


class Called(msgspec.Struct, frozen=True, tag="call"):
    """A call was accepted. ``payload``: the body of its request."""

    seq: int
    kind: str
    payload: bytes
    time: float


class Began(msgspec.Struct, frozen=True, tag="began"):
    """The call is about to be carried out; ``restoring``: first the tenant's state is restored. Not synced."""

    seq: int
    restoring: bool


class Interrupted(msgspec.Struct, frozen=True, tag="interrupted"):
    """The process was stopped in a call, which is not to blame."""


class Named(msgspec.Struct, frozen=True, tag="named"):
    """Saved weights: a state in ``folder``, or a ``snapshot``. ``name``: its path, or a sampling session.

    ``inflight``: the session samples from the newest snapshot that was saved so. No folder, no snapshot: deleted.
    """

    name: str
    folder: str = ""
    snapshot: Snapshot | None = None
    inflight: bool = False
    time: float = 0.0


class Answered(msgspec.Struct, frozen=True, tag="result"):
    """Result of a call. ``error``: "", "user" or "server"; with one, the call has changed nothing, but that a refused
    optimizer step may have dropped the gradients.

    ``named``: the weights that it saved; in the same record, so that both are there or none.
    """

    seq: int
    payload: bytes
    error: str = ""
    proto: bool = False
    named: Named | None = None


class Checkpoint(msgspec.Struct, frozen=True, tag="checkpoint"):
    """``folder`` has the state after call ``seq``, which has no gradients."""

    seq: int
    folder: str


class Unloaded(msgspec.Struct, frozen=True, tag="unloaded"):
    """The tenant takes no more calls; weights with a name remain."""


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """In the journal of the service: ``owner`` opened a session, or a sampling session of the weights at ``path``."""

    id: str
    owner: str
    path: str | None = None


Record = Called | Began | Interrupted | Named | Answered | Checkpoint | Unloaded | Opened


class Compacted(msgspec.Struct, frozen=True, tag="snapshot"):
    """First record of a compacted journal: what is needed of the ``records`` before it. ``next``: the next call."""

    records: int
    chain: int
    next: int
    steps: int  # optimizer steps taken
    kept: list[Record]
    last_call: float = 0.0  # time of the newest call


_decode = msgspec.json.Decoder[Record | Compacted](Record | Compacted).decode


class TenantJournal:
    """Writer of a tenant's journal. Everything that was appended is durable after ``synced``."""

    def __init__(self, path: Path) -> None:
        """Open or create the file; a torn tail is cut. Raises LedgerError."""
        self._path = path
        self._open()
        self._lock = asyncio.Lock()
        self._appended = 0
        self._durable = 0

    def replay(self) -> list[Record | Compacted]:
        """Return what the file had when it was opened. Only the first call does."""
        return self._journal.replay()

    def append(self, *records: Record) -> None:
        """Write records: they survive the death of this process. Raises LedgerError."""
        if self._closed:
            self._open()
        self._journal.append(records)
        self._appended += 1

    async def synced(self) -> None:
        """Return when what was appended survives the death of the machine: one fsync for all that wait meanwhile."""
        mine = self._appended
        async with self._lock:
            if self._durable < mine:
                upto = self._appended
                await asyncio.to_thread(self._journal.sync)
                self._durable = upto

    @property
    def is_large(self) -> bool:
        """True when it is time for a checkpoint, after which ``compact`` drops what came before."""
        return self._compactor.due

    async def compact(self, state: Compacted, *, small: bool = False) -> None:
        """Replace a large file, or also a small one, by ``state``, which is that after the last record."""
        if small or self.is_large:
            records = self._journal.records
            await self._compactor.compact(lambda: msgspec.structs.replace(state, records=records))

    def close(self) -> None:
        """Close the file until something is appended."""
        self._journal.close()
        self._closed = True

    def _open(self) -> None:
        self._journal: Journal[Record | Compacted] = Journal(self._path, _decode)
        self._compactor = Compactor(self._journal, _COMPACT_ABOVE)
        self._closed = False


def read(path: Path) -> Iterable[Record | Compacted]:
    """Yield the records of a journal, also while it is written. Raises LedgerError for damage before its end."""
    return (record for record, _ in read_journal(path, _decode))


def audit(folder: Path) -> list[str]:
    """Check the journals of all tenants in ``folder``. Returns one line per problem.

    order        a call is carried out after all calls before it; one that failed changed nothing
    once         a call is accepted once and has one result
    none-lost    a checkpoint comes after the results of all calls that it holds
    """
    problems = []
    for path in sorted(folder.glob("*/journal")):
        problems += [f"{path.parent.name}: {problem}" for problem in _problems(read(path))]
    return problems


def _problems(records: Iterable[Record | Compacted]) -> list[str]:
    problems: list[str] = []
    called: set[int] = set()
    answered: set[int] = set()
    done = -1  # all calls up to this one have a result

    def carried_out(seq: int) -> None:
        nonlocal done
        answered.add(seq)
        while done + 1 in answered:
            done += 1

    flat: list[Record] = []
    for record in records:
        if isinstance(record, Compacted):
            done = record.next - 1
            answered |= {kept.seq for kept in record.kept if isinstance(kept, Answered)}
            called |= {kept.seq for kept in record.kept if isinstance(kept, Called)} | answered
            if any(kept.seq > done for kept in record.kept if isinstance(kept, Checkpoint)):
                problems.append("none-lost: the compacted journal has a checkpoint of calls without results")
        else:
            flat.append(record)
    for record in flat:
        match record:
            case Called(seq=seq):
                if seq in called or seq < 0:
                    problems.append(f"once: call {seq} was accepted twice")
                called.add(seq)
            case Began(seq=seq) if seq != done + 1:
                problems.append(f"order: call {seq} began after call {done}")
            case Answered(seq=seq, error=error):
                if seq in answered or seq <= done:
                    problems.append(f"once: call {seq} has two results")
                if seq not in called:
                    problems.append(f"once: call {seq} has a result and was never accepted")
                if seq != done + 1 and not error:
                    problems.append(f"order: call {seq} was answered after call {done}")
                carried_out(seq)
            case Checkpoint(seq=seq) if seq > done:
                problems.append(f"none-lost: a checkpoint of call {seq} comes before its result")
            case _:
                pass
    return problems
