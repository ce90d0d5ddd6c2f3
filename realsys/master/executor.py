"""Runs the dataflow graph of one batch over the meshes.

Consumes a batch (sequences in minibatches) and who owns which arrays; waits for keys; a finished call unblocks the
calls that read what it made; produces each call's statistics. Calls on different meshes run at the same time; every
rank of a mesh receives its calls in one order, because a call is sent to all of them before the next one is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from realsys.buffer.redistribute import plan_transfers
from realsys.cluster.topology import Mesh
from realsys.master.graph import Dataflow, FunctionCall
from realsys.types import ARRAY_KEYS, MfcReply, MfcRequest, SequenceRef, Transfer

Minibatches = list[list[list[SequenceRef]]]  # [minibatch][dp rank] -> sequences


class Broadcast(Protocol):
    """Send one request to several workers, in one order, and gather their replies."""

    async def __call__(self, workers: Sequence[int], payload: MfcRequest) -> list[MfcReply]: ...


@dataclass(slots=True)
class Ownership:
    """Which workers hold which array of which sample: ``owners[key][sample_id]``."""

    owners: dict[str, dict[str, set[int]]] = field(default_factory=dict)

    def add(self, key: str, sample_id: str, worker: int) -> None:
        self.owners.setdefault(key, {}).setdefault(sample_id, set()).add(worker)

    def add_owners(self, keys: Iterable[str], owners: Mapping[str, Iterable[int]]) -> None:
        """``owners``: sample id -> workers that hold all of ``keys``."""
        for key in keys:
            for sample_id, workers in owners.items():
                self.owners.setdefault(key, {}).setdefault(sample_id, set()).update(workers)

    def forget(self, sample_ids: Sequence[str]) -> set[int]:
        """Drop these samples; returns the workers that held anything of them."""
        holders: set[int] = set()
        for samples in self.owners.values():
            for sample_id in sample_ids:
                holders |= samples.pop(sample_id, set())
        return holders


@dataclass(frozen=True, slots=True)
class CallResult:
    """What one call reported: mesh-reduced statistics, and the slowest rank's seconds."""

    stats: dict[str, float]
    seconds: float


class GraphExecutor:
    """Executes one graph; one instance per graph, used for every step."""

    def __init__(self, flow: Dataflow, meshes: Mapping[str, Mesh], broadcast: Broadcast) -> None:
        self._flow, self._meshes, self._broadcast = flow, meshes, broadcast

    async def run(
        self,
        plans: Mapping[str, Minibatches],
        ownership: Ownership,
        *,
        step: int,
        version: int,
        args: Mapping[str, dict[str, Any]],
    ) -> dict[str, CallResult]:
        """Run every call once. ``plans`` maps role to its minibatches, ``args`` call name to extra arguments.

        Raises what a worker answered first (RemoteError, WorkerLost, WaitTimeout); calls still running are cancelled.
        """
        available, started = set(self._flow.source_keys), set[str]()
        results: dict[str, CallResult] = {}
        running: dict[asyncio.Task[CallResult], FunctionCall] = {}
        try:
            while len(results) < len(self._flow.calls):
                for call in self._flow.ready(available, started):
                    request = self._request(call, plans[call.role], ownership, step, version, args.get(call.name, {}))
                    task = asyncio.create_task(self._call(call, request), name=f"mfc {call.name} step {step}")
                    running[task] = call
                    started.add(call.name)
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    call = running.pop(task)
                    results[call.name] = task.result()
                    self._own_outputs(call, plans[call.role], ownership)
                    available |= call.outputs
        finally:
            for task in running:
                task.cancel()
        return results

    def _request(
        self,
        call: FunctionCall,
        minibatches: Minibatches,
        ownership: Ownership,
        step: int,
        version: int,
        args: dict[str, Any],
    ) -> MfcRequest:
        transfers = self._transfers(call, minibatches, ownership)
        return MfcRequest(call.name, call.role, call.interface, step, version, minibatches, transfers, args)

    async def _call(self, call: FunctionCall, request: MfcRequest) -> CallResult:
        mesh = self._meshes[call.role]
        replies = await self._broadcast(mesh.workers, request)
        head = mesh.dp_head(0)
        stats = next(reply.stats for reply in replies if reply.worker == head)
        return CallResult(stats, max(reply.seconds for reply in replies))

    def _transfers(self, call: FunctionCall, minibatches: Minibatches, ownership: Ownership) -> list[Transfer]:
        """What each rank lacks: whole sequences on every stage, answer arrays on the last stage only."""
        mesh = self._meshes[call.role]
        merged: dict[tuple[int, int, tuple[str, ...]], list[str]] = {}
        for key in sorted(call.inputs):
            needs: dict[int, list[str]] = {}
            for dp in range(mesh.layout.data):
                ids = [ref.sample_id for minibatch in minibatches for ref in minibatch[dp]]
                members = mesh.dp_members(dp) if ARRAY_KEYS[key][1] == "sequence" else last_stage(mesh, dp)
                needs.update(dict.fromkeys(members, ids))
            for transfer in plan_transfers(needs, [key], ownership.owners.get(key, {})):
                merged.setdefault((transfer.src, transfer.dst, tuple(transfer.sample_ids)), []).append(key)
                for sample_id in transfer.sample_ids:
                    ownership.add(key, sample_id, transfer.dst)
        return [Transfer(src, dst, list(ids), keys) for (src, dst, ids), keys in merged.items()]

    def _own_outputs(self, call: FunctionCall, minibatches: Minibatches, ownership: Ownership) -> None:
        mesh = self._meshes[call.role]
        for dp in range(mesh.layout.data):
            for worker in last_stage(mesh, dp):
                for minibatch in minibatches:
                    for ref in minibatch[dp]:
                        for key in call.outputs:
                            ownership.add(key, ref.sample_id, worker)


def last_stage(mesh: Mesh, dp: int) -> list[int]:
    """Workers of DP rank ``dp`` that hold the last pipeline stage, all tensor ranks."""
    stage = mesh.layout.pipeline - 1
    return [mesh.workers[mesh.rank(dp, tp, stage)] for tp in range(mesh.layout.tensor)]
