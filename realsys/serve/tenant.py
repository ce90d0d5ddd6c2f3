"""One model of a client: its calls, results and saved weights, as its journal has them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from realsys.serve import wire
from realsys.serve.contract import Snapshot
from realsys.serve.journal import (
    Answered,
    Began,
    Called,
    Checkpoint,
    Compacted,
    Interrupted,
    Named,
    Record,
    TenantJournal,
    Unloaded,
)

SNAPSHOTS = 8  # unnamed snapshots that a tenant keeps; a client samples from the newest ones
_INFLIGHT = 64  # sampling sessions of the newest weights that a tenant keeps
_RESULTS = 256  # results that wait to be retrieved, after a checkpoint
_AGAIN = 16  # newest results that a client may retrieve again after a checkpoint
_CHANGING = ("forward_backward", "optim_step", "load_weights")  # calls that a restart repeats


class Tenant:
    """One model of a client. ``next``: the next call; ``results``: durable; ``changed``: set by the next one."""

    def __init__(self, model_id: str, owner: str, folder: Path) -> None:
        self.id = model_id
        self.owner = owner
        self.name = model_id.replace(":", "-")  # for the ranks: a part of file names
        self.folder = folder / self.name
        self.journal = TenantJournal(self.folder / "journal")
        self.waiting: dict[int, Called] = {}
        self.results: dict[int, Answered] = {}
        self.retrieved: set[int] = set()
        self.skipped: set[int] = set()  # calls after ``next`` that have a result: one before them never came
        self.names: dict[str, Named] = {}
        self.next = 0
        self.steps = self.since_checkpoint = self.tokens = 0
        self.seed = 0
        self.checkpoint: Checkpoint | None = None
        self.repeat: list[Called] = []  # calls that a restart repeats to restore the state
        self.loaded = self.unloaded = self.has_gradients = False
        self.dropped = False  # unloaded, and its journal has nothing but what remains
        self.tries = self.restores = 0  # of the call ``next``, without an end
        self.gap_since: float | None = None
        self.last_error = ""
        self.last_call = 0.0
        self.changed = asyncio.Event()
        for record in self.journal.replay():
            self._fold(record)

    @property
    def inflight(self) -> Snapshot | None:
        """The newest weights that were saved for all sessions of this kind."""
        return next((named.snapshot for named in reversed(self.names.values()) if named.inflight), None)

    def snapshots(self) -> list[Snapshot]:
        """Return the weights that can be sampled from."""
        kept = [named.snapshot for named in self.names.values() if named.snapshot and not named.inflight]
        return [*kept, self.inflight] if self.inflight else kept

    def _fold(self, record: Record | Compacted) -> None:
        """Take one record from the journal."""
        match record:
            case Compacted():
                self.next, self.steps, self.last_call = record.next, record.steps, record.last_call
                for kept in record.kept:
                    self._fold(kept)
                self.dropped = self.unloaded
            case Called():
                self.waiting[record.seq] = record
                self.last_call = record.time
                if record.kind == "create_model":
                    self.seed = seed_of(record.payload)
            case Began(restoring=True):
                self.restores += 1
            case Began():
                self.restores, self.tries = 0, self.tries + 1
            case Interrupted():
                self.restores, self.tries = max(self.restores - 1, 0), max(self.tries - 1, 0)
            case Named():
                self.name_weights(record)
            case Answered():
                call = self.waiting.get(record.seq)
                self.answer(record)
                if record.named is not None:
                    self.name_weights(record.named)
                if call is not None and _has_changed(call, record):
                    self.repeat.append(call)
            case Checkpoint():
                self.checkpoint, self.repeat, self.since_checkpoint = record, [], 0
            case Unloaded():
                self.unloaded = True

    def answer(self, record: Answered) -> None:
        """Take the result of a call, which is durable."""
        self.results[record.seq] = record
        call = self.waiting.pop(record.seq, None)
        if record.seq < self.next:
            return  # the journal was compacted after it
        if record.seq == self.next:
            self.tries = 0
        self.skipped.add(record.seq)
        while self.next in self.skipped:
            self.skipped.remove(self.next)
            self.next += 1
        if record.error:
            self.last_error = msgspec.json.decode(record.payload)["error"]
        if call is not None and _has_changed(call, record):
            if not record.error:  # a refused step may have left the gradients
                self.has_gradients = call.kind == "forward_backward"
            taken = call.kind == "optim_step" and not record.error
            self.steps, self.since_checkpoint = self.steps + taken, self.since_checkpoint + taken
        if len(self.results) > 2 * _RESULTS:
            self.forget_results()
        self.changed.set()
        self.changed = asyncio.Event()

    def name_weights(self, named: Named) -> None:
        """Take saved weights, and forget the oldest ones without a name."""
        self.names.pop(named.name, None)
        if named.folder or named.snapshot:
            self.names[named.name] = named
        for inflight, most in ((False, SNAPSHOTS), (True, _INFLIGHT)):
            sessions = [
                n.name for n in self.names.values() if n.inflight == inflight and not n.name.startswith("tinker:")
            ]
            for name in sessions[:-most]:
                del self.names[name]

    def forget_results(self) -> None:
        """Drop results that were retrieved, but for the newest ones, and the oldest of too many."""
        keep = [seq for seq in sorted(self.results) if seq not in self.retrieved or seq >= self.next - _AGAIN]
        self.results = {seq: self.results[seq] for seq in keep[-_RESULTS:]}
        self.retrieved &= set(self.results)

    def state(self) -> Compacted:
        """Return what the journal must keep after a checkpoint."""
        results = [msgspec.structs.replace(result, named=None) for result in self.results.values()]
        kept: list[Record] = [*self.names.values(), *results, *self.waiting.values()]
        kept += [self.checkpoint] if self.checkpoint else []
        kept += [Unloaded()] if self.unloaded else []
        return Compacted(0, 0, self.next, self.steps, kept, self.last_call)


def _has_changed(call: Called, result: Answered) -> bool:
    """Return True if the call may have changed the tenant's state: a refused optimizer step drops bad gradients."""
    return call.kind in _CHANGING and (not result.error or (call.kind == "optim_step" and result.error == "user"))


def seed_of(payload: bytes) -> int:
    lora = msgspec.json.decode(payload, type=wire.CreateModel).lora_config
    return lora.seed or 0 if lora else 0
