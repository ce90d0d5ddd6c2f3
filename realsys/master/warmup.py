"""The supervised warm-up: the same ModelWorkers, another graph.

Consumes demonstrations by index; the next batch is tokenised by the DP heads while the current one trains.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np

from realsys.algorithm.schedule import learning_rate
from realsys.buffer.balance import CostFunction
from realsys.buffer.minibatches import plan_minibatches, sequence_refs
from realsys.buffer.sequence_buffer import owners_of
from realsys.cluster.topology import Mesh
from realsys.config.allocation import ACTOR
from realsys.config.schema import WarmupConfig
from realsys.master.calls.executor import GraphExecutor
from realsys.master.calls.model_workers import ModelWorkers
from realsys.master.calls.ownership import Ownership
from realsys.master.step_log import StepLog
from realsys.types import SampleMeta


class Warmup:
    """Runs ``config.steps`` steps over ``demos`` demonstrations in a seeded order."""

    def __init__(
        self,
        config: WarmupConfig,
        *,
        demos: int,
        seed: int,
        mesh: Mesh,
        cost: CostFunction,
        workers: ModelWorkers,
        executor: GraphExecutor,
        step_log: StepLog,
    ) -> None:
        self._config, self._demos, self._seed, self._mesh, self._cost = config, demos, seed, mesh, cost
        self._workers, self._executor, self._log = workers, executor, step_log

    async def run(self) -> None:
        if not self._config.steps:
            return
        upcoming = asyncio.create_task(self._load(0))
        try:
            for step in range(self._config.steps):
                samples = await upcoming
                if step + 1 < self._config.steps:
                    upcoming = asyncio.create_task(self._load(step + 1))
                await self._step(step, samples)
        finally:
            upcoming.cancel()
            await asyncio.gather(upcoming, return_exceptions=True)  # seen, also when another error ends the phase

    async def _load(self, step: int) -> list[SampleMeta]:
        """Demonstrations of one step, spread over the DP heads."""
        indices = demo_indices(step, batch=self._config.batch, size=self._demos, seed=self._seed)
        heads = self._mesh.dp_heads()
        replies = await asyncio.gather(
            *(self._workers.load_demos(head, indices[i :: len(heads)]) for i, head in enumerate(heads))
        )
        return sorted((s for reply in replies for s in reply.samples), key=lambda s: s.sample_id)

    async def _step(self, step: int, samples: list[SampleMeta]) -> None:
        start = time.perf_counter()
        ownership = Ownership()
        ownership.add_owners(["tokens", "loss_mask"], owners_of([samples]))
        refs = sequence_refs([[sample] for sample in samples])
        rate = learning_rate(self._config.optimizer, step, self._config.steps)
        results = await self._executor.run(
            {ACTOR: plan_minibatches(refs, 1, self._mesh.layout.data, self._cost)},
            ownership,
            step=step,
            version=-1,
            args={"sft": {"lr": rate}},
        )
        ids = [sample.sample_id for sample in samples]
        await self._workers.clear(sorted(ownership.forget(ids)), ids)
        self._log.append(
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
    """Which demonstrations step ``step`` uses: a fresh seeded permutation for every pass over the data."""
    chosen: list[int] = []
    position = step * batch
    while len(chosen) < batch:
        epoch, offset = divmod(position + len(chosen), size)
        order = np.random.default_rng([seed, epoch]).permutation(size)
        chosen.extend(int(i) for i in order[offset : offset + batch - len(chosen)])
    return chosen
