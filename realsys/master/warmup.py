"""The supervised warm-up: another dataflow graph on the same ModelWorkers.

Consumes demonstrations by index. The DP heads tokenise the next batch while the current one trains.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np

from realsys.algorithm.batch.balance import CostFunction
from realsys.algorithm.batch.minibatches import plan_minibatches, sequence_refs
from realsys.algorithm.batch.sequence_buffer import owners_of
from realsys.algorithm.schedule import learning_rate
from realsys.cluster.topology import Mesh
from realsys.config.allocation import ACTOR
from realsys.config.schema import WarmupConfig
from realsys.master.calls.executor import GraphExecutor
from realsys.master.calls.model_workers import ModelWorkers
from realsys.master.calls.ownership import Ownership
from realsys.master.records.recorder import check_finite
from realsys.master.step_log import StepLog
from realsys.types import SampleMeta


@dataclass(frozen=True, slots=True)
class WarmupParts:
    """The collaborators of a Warmup.

    ``executor`` runs the supervised graph, ``mesh`` and ``cost`` are the actor's.
    """

    mesh: Mesh
    cost: CostFunction
    workers: ModelWorkers
    executor: GraphExecutor
    step_log: StepLog


class Warmup:
    """The supervised steps before training: ``config.steps`` steps over ``demos`` demonstrations in
    a seeded order.
    """

    def __init__(self, config: WarmupConfig, parts: WarmupParts, *, demos: int, seed: int) -> None:
        self._config = config
        self._parts = parts
        self._demos = demos
        self._seed = seed

    async def run(self) -> None:
        """Run all steps.

        Raises what a worker raised; then no request of the warm-up is still awaited.
        """
        if not self._config.steps:
            return
        upcoming = asyncio.create_task(self._load(0))
        try:
            for step in range(self._config.steps):
                samples = await upcoming
                # The heads tokenise the next batch while this one trains.
                if step + 1 < self._config.steps:
                    upcoming = asyncio.create_task(self._load(step + 1))
                await self._step(step, samples)
        finally:
            upcoming.cancel()
            # Also retrieves its exception: asyncio would otherwise log a second error next to the
            # one that ends the phase.
            await asyncio.gather(upcoming, return_exceptions=True)

    async def _load(self, step: int) -> list[SampleMeta]:
        """Have the DP heads load the demonstrations of one step, each an equal share; return their
        metadata.
        """
        indices = demo_indices(step, batch=self._config.batch, size=self._demos, seed=self._seed)
        heads = self._parts.mesh.dp_heads()
        replies = await asyncio.gather(
            *(self._parts.workers.load_demos(head, indices[i :: len(heads)]) for i, head in enumerate(heads))
        )
        return sorted((s for reply in replies for s in reply.samples), key=lambda s: s.sample_id)

    async def _step(self, step: int, samples: list[SampleMeta]) -> None:
        start = time.perf_counter()
        ownership = Ownership()
        ownership.add_owners(["tokens", "loss_mask"], owners_of([samples]))
        refs = sequence_refs([[sample] for sample in samples])
        rate = learning_rate(self._config.optimizer, step, self._config.steps)
        results = await self._parts.executor.run(
            {ACTOR: plan_minibatches(refs, 1, self._parts.mesh.layout.data, self._parts.cost)},
            ownership,
            step=step,
            version=-1,
            args={"sft": {"lr": rate}},
        )
        await check_finite(results)
        ids = [sample.sample_id for sample in samples]
        await self._parts.workers.clear(ownership.discard_samples(ids))
        self._parts.step_log.append(
            {
                "kind": "warmup",
                "time": time.time(),
                "step": step + 1,
                "total": self._config.steps,
                "loss": results["sft"].stats["loss"],
                "tokens": sum(s.length for s in samples),
                "seconds": time.perf_counter() - start,
                "lr": rate,
            }
        )


def demo_indices(step: int, *, batch: int, size: int, seed: int) -> list[int]:
    """Return the demonstrations of ``step`` (0 is the first): every pass over the data has its own
    permutation.
    """
    chosen: list[int] = []
    position = step * batch
    while len(chosen) < batch:
        epoch, offset = divmod(position + len(chosen), size)
        order = np.random.default_rng([seed, epoch]).permutation(size)
        chosen.extend(int(i) for i in order[offset : offset + batch - len(chosen)])
    return chosen
