"""ModelWorkers as asyncio tasks: they serve requests strictly in the order of arrival, and meet in collectives.

Time is counted in turns of the event loop, so a run depends on nothing but its seed, and a deadlock is found by
counting: a worker that waits for the others of a request longer than ``BOUND`` turns raises ``Deadlock``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from realsys.cluster.stream.codec import decode_message
from realsys.cluster.topology import Mesh
from realsys.config.dataflow import Dataflow
from realsys.model_calls import (
    ClearRequest,
    Empty,
    KeepDroppedRequest,
    MaskRequest,
    MfcReply,
    MfcRequest,
    TransferReply,
    TransferRequest,
)
from realsys.train.step_gate import GateState, SettleRequest
from realsys.types import METADATA_KEYS

BOUND = 3000  # far beyond the turns of all requests of a test together

Held = set[tuple[str, str]]  # (key, sample id)


class Deadlock(Exception):
    """Some workers of a request wait for others that never come."""


@dataclass(frozen=True, slots=True)
class Event:
    request: str  # name of the call, or "transfer {n}"
    worker: int
    what: Literal["start", "end"]


@dataclass(slots=True)
class Sent:
    """One request on its way. ``payloads``: worker -> its own; a call's is the same for all."""

    name: str
    payloads: Mapping[int, Any]
    replies: dict[int, asyncio.Future[Any]]
    met: list[int] = field(default_factory=lambda: [0, 0])  # who reached its first and its last collective

    @property
    def workers(self) -> list[int]:
        return list(self.payloads)

    @property
    def payload(self) -> Any:
        """That of the first worker."""
        return next(iter(self.payloads.values()))

    @property
    def has_collectives(self) -> bool:
        return not isinstance(self.payload, ClearRequest | MaskRequest | KeepDroppedRequest)


class SimulatedWorkers:
    """Records which worker has which array; fails on a read of a missing array, a double transfer, or a deadlock.

    ``turns``: how long the next request takes on a worker. ``score``: sample id -> the score that calls report.
    """

    def __init__(
        self,
        flow: Dataflow,
        meshes: Mapping[str, Mesh],
        count: int,
        *,
        turns: Callable[[], int] = lambda: 1,
        score: Callable[[str], float | None] = lambda sample_id: None,
    ) -> None:
        self.flow, self.meshes, self._turns, self._score = flow, meshes, turns, score
        self.held: dict[int, Held] = {worker: set() for worker in range(count)}
        self.sent: list[Sent] = []
        self.events: list[Event] = []
        self.moved = 0  # arrays
        self.report: dict[str, dict[str, Any]] = {}  # call -> fields of the replies to it
        self._queues: list[asyncio.Queue[Sent]] = [asyncio.Queue() for _ in range(count)]

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[SimulatedWorkers]:
        tasks = [asyncio.create_task(self._serve(worker)) for worker in self.held]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- what the executor sees --------------------------------------------------------------------------------------

    def transfer(self, requests: Mapping[int, bytes]) -> asyncio.Future[list[TransferReply]]:
        decoded = {worker: decode_message(request, TransferRequest) for worker, request in requests.items()}
        return self._send(f"transfer {len(self.sent)}", decoded)

    def run_mfc(self, mesh: Mesh, payload: MfcRequest) -> asyncio.Future[list[MfcReply]]:
        return self._send(payload.mfc, dict.fromkeys(mesh.workers, payload))

    def clear(self, samples: Mapping[int, list[str]], keys: Sequence[str] = ()) -> asyncio.Future[list[Empty]]:
        requests = {worker: ClearRequest(ids, list(keys)) for worker, ids in samples.items()}
        return self._send(f"clear {len(self.sent)}", requests)

    def mask(self, samples: Mapping[int, list[str]], oldest: int) -> asyncio.Future[list[Empty]]:
        requests = {worker: MaskRequest(ids, oldest) for worker, ids in samples.items()}
        return self._send(f"mask {len(self.sent)}", requests)

    def keep_dropped(self, groups: Mapping[int, KeepDroppedRequest]) -> asyncio.Future[list[Empty]]:
        return self._send(f"keep {len(self.sent)}", groups)

    def _send(self, name: str, payloads: Mapping[int, Any]) -> asyncio.Future[list[Any]]:
        loop = asyncio.get_running_loop()
        sent = Sent(name, payloads, {worker: loop.create_future() for worker in payloads})
        self.sent.append(sent)
        self.deliver(sent)
        return asyncio.gather(*sent.replies.values())

    def deliver(self, sent: Sent) -> None:
        """Send to all recipients before any other request, like a broadcast."""
        for worker in sent.workers:
            self.enqueue(worker, sent)

    def enqueue(self, worker: int, sent: Sent) -> None:
        self._queues[worker].put_nowait(sent)

    async def pause_step(self) -> list[GateState]:
        """Return the state of a gate that has passed everything so far."""
        calls = [sent.payload for sent in self.sent if isinstance(sent.payload, MfcRequest)]
        updating = any(c.handler.endswith("_train") and c.version == calls[-1].version for c in calls)
        return [GateState(calls[-1].version, {}, updating)]

    async def settle_step(self, payload: SettleRequest) -> list[GateState]:
        assert not payload.abandon, "its calls cannot be abandoned"
        return await self.pause_step()

    # -- a worker ----------------------------------------------------------------------------------------------------

    async def _serve(self, worker: int) -> None:
        while True:
            sent = await self._queues[worker].get()
            reply = sent.replies[worker]
            try:
                result = await self._handle(worker, sent)
            except (AssertionError, Deadlock) as error:  # answered, and then the worker ends, like a real one
                if not reply.done():
                    reply.set_exception(error)
                return
            if not reply.done():
                reply.set_result(result)

    async def _handle(self, worker: int, sent: Sent) -> Any:
        self.events.append(Event(sent.name, worker, "start"))
        await self._meet(0, worker, sent)
        turns = self._turns()
        for _ in range(turns):
            await asyncio.sleep(0)
        match payload := sent.payloads[worker]:
            case TransferRequest():
                reply: Any = TransferReply(self._move(worker, payload))
            case MfcRequest():
                reply = self._compute(worker, payload)
                reply.seconds = float(turns)
            case ClearRequest(sample_ids, keys):
                gone = {(key, s) for key, s in self.held[worker] if s in sample_ids and (not keys or key in keys)}
                assert {s for _, s in gone} == set(sample_ids), f"worker {worker} is to clear samples that it lacks"
                self.held[worker] -= gone
                reply = Empty()
            case MaskRequest(sample_ids):
                held = {sample_id for _, sample_id in self.held[worker]}
                assert held.issuperset(sample_ids), f"worker {worker} is to mask samples that it lacks"
                reply = Empty()
            case KeepDroppedRequest(samples=samples):
                held = {sample_id for _, sample_id in self.held[worker]}
                assert held.issuperset(sample.sample_id for sample in samples), f"worker {worker} has cleared the group"
                reply = Empty()
        await self._meet(1, worker, sent)
        self.events.append(Event(sent.name, worker, "end"))
        return reply

    async def _meet(self, which: int, worker: int, sent: Sent) -> None:
        if not sent.has_collectives:
            return
        sent.met[which] += 1
        for _ in range(BOUND):
            if sent.met[which] == len(sent.workers):
                return
            await asyncio.sleep(0)
        raise Deadlock(f"worker {worker} waits in {sent.name} for {len(sent.workers) - sent.met[which]} others")

    def _move(self, worker: int, request: TransferRequest) -> int:
        received = 0
        known = {ref.sample_id for ref in request.sequences}
        assert known == {name for t in request.transfers for name in t.sample_ids}, "lengths of samples of others"
        for transfer in request.transfers:
            assert worker in (transfer.src, *transfer.dsts), f"worker {worker} gets a transfer of others"
            for item in ((key, sample) for sample in transfer.sample_ids for key in transfer.keys):
                assert item[1] in known, f"nobody can know the length of {item[1]}"
                if transfer.src == worker:
                    assert item in self.held[worker], f"worker {worker} is to send {item}, which it lacks"
                if worker in transfer.dsts:
                    assert item not in self.held[worker], f"worker {worker} gets {item} twice"
                    self.held[worker].add(item)
                    received += 1
        self.moved += received
        return received

    def _compute(self, worker: int, request: MfcRequest) -> MfcReply:
        mesh = self.meshes[request.role]
        inputs, outputs = set(request.inputs) - METADATA_KEYS, set(request.outputs) - METADATA_KEYS
        dp, _, pp = mesh.coordinates(mesh.workers.index(worker))
        last = pp == mesh.layout.pipeline - 1
        samples = [ref.sample_id for minibatch in request.minibatches for ref in minibatch[dp]]
        for key in inputs:
            if last or key == "tokens":
                for sample in samples:
                    assert (key, sample) in self.held[worker], (
                        f"worker {worker} lacks {key} of {sample} for {request.mfc}"
                    )
        if last:
            self.held[worker] |= {(key, sample) for key in outputs for sample in samples}
        reply = MfcReply(worker, **({"stats": {"rank": float(worker)}} | self.report.get(request.mfc, {})))
        if worker == mesh.dp_head(dp) and "scores" in request.outputs:
            found = {sample: self._score(sample) for sample in samples}
            reply.scores = {sample: score for sample, score in found.items() if score is not None}
        return reply
