"""The MasterWorker's step loop.

    connect ──> warm-up (sft) ──> publish v0 ──> evaluate "before" ──┐
        ┌────────────────────────────────────────────────────────────┘
        └─> batch ──> plan ──> actor_inf ──> actor_train ──> save ──> publish v ──> tell manager ──> clear ─┐
             ^                                                                                              │
             └──────────────── until steps, epochs or time are used up ─────────────────────────────────────┘
        ──> evaluate "after" ──> export the last version

Consumes metadata of groups (notices `samples_arrived`); waits for a batch's worth of them; is unblocked by the
arrival of a group; produces weight versions, the step log and the final checkpoint. Never sees a token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from realsys.admission.messages import TrainedRequest
from realsys.algorithm.schedule import learning_rate
from realsys.buffer.batch import plan_minibatches, sequence_refs
from realsys.buffer.replay import Batch, SequenceBuffer, owners_of
from realsys.cluster.topology import Mesh
from realsys.config.schema import Config
from realsys.errors import StuckError, WaitTimeout
from realsys.master.evaluation import Evaluations
from realsys.master.executor import GraphExecutor, Ownership
from realsys.master.graph import SOURCE_KEYS
from realsys.master.publish import Publisher
from realsys.master.statistics import batch_statistics, train_record
from realsys.master.step_log import StepLog
from realsys.master.stuck import StuckCheck
from realsys.master.workers import ModelWorkers
from realsys.rollout.manager_client import ManagerClient
from realsys.types import SampleMeta

log = logging.getLogger(__name__)

_LOOK_S = 5.0  # between two looks at the manager's status while no group arrives

#: what the manager's status page shows of the last step
SHOWN = ("step", "seconds", "train_tokens_per_s", "consumed_tokens_per_s", "accuracy")


class TrainLoop:
    """Asynchronous PPO: takes groups as they arrive, trains, publishes, reports."""

    def __init__(
        self,
        config: Config,
        *,
        mesh: Mesh,
        workers: ModelWorkers,
        executor: GraphExecutor,
        publisher: Publisher,
        manager: ManagerClient,
        evaluations: Evaluations,
        step_log: StepLog,
        show: Callable[[dict[str, Any]], Awaitable[None]],
        total_steps: int,
    ) -> None:
        self._config, self._mesh, self._workers = config, mesh, workers
        self._executor, self._publisher, self._manager, self._log = executor, publisher, manager, step_log
        self._evaluations, self._show, self._total_steps = evaluations, show, total_steps
        self._buffer = SequenceBuffer(config.rollout.group_size)
        self._unwanted: list[SampleMeta] = []  # to be freed at the next step
        self._arrived = asyncio.Event()
        self._started = time.monotonic()

    def on_samples(self, samples: list[SampleMeta]) -> None:
        """Notice `samples_arrived` of a DP head. Copies of a group are refused, and freed where they lie."""
        added = self._buffer.add(samples)
        if added.rejected:
            log.warning("refused %d samples that came twice, of %s", added.rejected, samples[0].ticket_id)
        self._unwanted.extend(added.clear)
        self._arrived.set()

    async def run(self) -> int:
        """Train until a stop condition holds; returns the number of steps done."""
        step = 0
        while step < self._total_steps and not self._out_of_time():
            step += 1
            await self.step(step)
            if (every := self._config.evaluation.every_steps) and step % every == 0 and step < self._total_steps:
                await self._evaluations.start(f"step-{step}", self._config.evaluation.every_problems, step)
            for record in await self._evaluations.finished():
                self._log.append(record)
        return step

    async def step(self, step: int) -> None:
        """One train step: version ``step - 1`` trains and becomes version ``step``."""
        version = step - 1
        begin = time.perf_counter()
        batch, dropped = await self._next_batch(version)
        samples = [sample for group in batch.groups for sample in group]
        ownership = Ownership()
        ownership.add_owners(SOURCE_KEYS, owners_of(batch.groups))
        waited = time.perf_counter()
        refs = sequence_refs(batch.groups)
        minibatches = plan_minibatches(refs, self._config.train.ppo.minibatches, self._mesh.layout.data)
        rate = learning_rate(self._config.train.optimizer, step - 1, self._config.train.total_steps)
        args = {"actor_train": {"lr": rate}}
        results = await self._executor.run({"actor": minibatches}, ownership, step=step, version=version, args=args)
        times = await self._publisher.publish(step, step)
        statistics = batch_statistics(samples, version=version, correct_reward=self._config.rollout.reward.correct)
        told = time.perf_counter()
        await self._manager.trained(
            TrainedRequest(
                step=step,
                version=step,
                trained=sorted({sample.ticket_id for sample in samples}),
                staleness=statistics["staleness"]["histogram"],
            )
        )
        ids = [sample.sample_id for sample in samples]
        await self._workers.clear(sorted(ownership.forget(ids)), ids)
        end = time.perf_counter()
        seconds = {
            "wait": waited - begin,
            "inf": results["actor_inf"].seconds if "actor_inf" in results else 0.0,
            "train": results["actor_train"].seconds,
            "save": times["save"],
            "publish": times["publish"] + end - told,
            "total": end - begin,
        }
        head = {"step": step, "total": self._total_steps, "version": step, "lr": rate, "dropped_stale": dropped}
        record = head | train_record(statistics, seconds, results)
        self._log.append({"kind": "train", "time": time.time(), **record})
        await self._show({key: record[key] for key in SHOWN})

    async def _next_batch(self, version: int) -> tuple[Batch, int]:
        """Wait for a batch's worth of groups inside the staleness bound; the too old are given back to the manager.

        Returns the batch and how many groups were given back. Raises StuckError when no further batch can come, and
        WaitTimeout naming what the manager is waiting for when no group arrives for ``request_timeout_s``.
        """
        asynchronous, wanted = self._config.asynchronous, self._config.train.batch_groups
        dropped = 0
        while True:
            self._arrived.clear()
            batch = self._buffer.take(wanted, version, asynchronous.max_head_offpolicyness, asynchronous.stale_policy)
            if batch.dropped:
                dropped += len(batch.dropped)
                await self._manager.trained(TrainedRequest(version, version, dropped=batch.dropped))
            await self._free([*batch.clear, *self._unwanted])
            if batch.groups:
                return batch, dropped
            await self._next_group(version + 1)

    async def _next_group(self, step: int) -> None:
        """Wait until samples arrive; meanwhile look now and then whether any will. Raises StuckError, WaitTimeout."""
        wanted, timeout = self._config.train.batch_groups, self._config.cluster.request_timeout_s
        check, deadline = StuckCheck(wanted), time.monotonic() + timeout
        while not await self._arrival(min(_LOOK_S, timeout)):
            ready = self._buffer.ready_groups
            if reason := check.look(await self._manager.status(), ready):
                raise StuckError(f"master_worker: step {step} can never get its batch: {reason}; see the workers' logs")
            if time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"master_worker: step {step} waited {timeout:g} s for a group; it has {ready} of {wanted}; "
                    f"the manager says: {await self._explain()}"
                )

    async def _arrival(self, timeout_s: float) -> bool:
        """Whether samples arrived in time."""
        try:
            await asyncio.wait_for(self._arrived.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def _explain(self) -> str:
        status = await self._manager.status()
        return f"admission {status.get('admission')}, ledger {status.get('ledger')}"

    async def _free(self, samples: list[SampleMeta]) -> None:
        """Free samples that will not be trained, each where the stream brought it."""
        self._unwanted = []
        by_owner: dict[int, list[str]] = {}
        for sample in samples:
            by_owner.setdefault(sample.owner, []).append(sample.sample_id)
        for owner, ids in sorted(by_owner.items()):
            await self._workers.clear([owner], ids)

    def _out_of_time(self) -> bool:
        limit = self._config.train.max_seconds
        return bool(limit) and time.monotonic() - self._started > limit


def planned_steps(config: Config, train_prompts: int) -> int:
    """Train steps that the stop conditions `total_steps` and `total_epochs` allow. At least 1."""
    steps = config.train.total_steps
    if config.train.total_epochs:
        steps = min(steps, max(1, config.train.total_epochs * train_prompts // config.train.batch_groups))
    return steps
