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

from realsys.algorithm.schedule import learning_rate
from realsys.buffer.batch import plan_minibatches, sequence_refs
from realsys.buffer.replay import SequenceBuffer
from realsys.cluster.topology import Mesh
from realsys.config.schema import Config
from realsys.errors import WaitTimeout
from realsys.master.executor import GraphExecutor, Ownership
from realsys.master.manager import ManagerPort
from realsys.master.publish import Publisher
from realsys.master.statistics import batch_statistics
from realsys.master.workers import ModelWorkers
from realsys.telemetry.steps import StepLog
from realsys.types import SampleMeta

log = logging.getLogger(__name__)

ARRIVAL_KEYS = ("tokens", "behav_logprobs", "versions")


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
        manager: ManagerPort,
        step_log: StepLog,
        total_steps: int,
    ) -> None:
        self._config, self._mesh, self._workers = config, mesh, workers
        self._executor, self._publisher, self._manager, self._log = executor, publisher, manager, step_log
        self._total_steps = total_steps
        self._buffer = SequenceBuffer(config.rollout.group_size)
        self._ownership = Ownership()
        self._arrived = asyncio.Event()
        self._started = time.monotonic()

    def on_samples(self, samples: list[SampleMeta]) -> None:
        """Notice `samples_arrived` of a DP head. Duplicates are refused by the buffer and freed at the head."""
        duplicates = self._buffer.add(samples)
        for sample in samples:
            for key in ARRIVAL_KEYS:
                self._ownership.add(key, sample.sample_id, sample.owner)
        if duplicates:
            log.warning("group arrived twice, second one ignored: %s", ", ".join(duplicates))
        self._arrived.set()

    async def run(self) -> int:
        """Train until a stop condition holds; returns the number of steps done."""
        step = 0
        while step < self._total_steps and not self._out_of_time():
            step += 1
            await self.step(step)
            if (every := self._config.evaluation.every_steps) and step % every == 0 and step < self._total_steps:
                await self._manager.start_evaluation(f"step-{step}", self._config.evaluation.every_problems, step)
            for record in await self._manager.finished_evaluations():
                self._log.append({"kind": "eval", **record})
        return step

    async def step(self, step: int) -> None:
        """One train step: version ``step - 1`` trains and becomes version ``step``."""
        version = step - 1
        begin = time.perf_counter()
        groups, dropped = await self._next_batch(version)
        samples = [sample for group in groups for sample in group]
        waited = time.perf_counter()
        refs = sequence_refs(groups)
        minibatches = plan_minibatches(refs, self._config.train.ppo.minibatches, self._mesh.layout.data)
        rate = learning_rate(self._config.train.optimizer, step - 1, self._config.train.total_steps)
        results = await self._executor.run(
            {"actor": minibatches},
            self._ownership,
            step=step,
            version=version,
            args={"actor_train": {"lr": rate}},
        )
        times = await self._publisher.publish(step, step)
        statistics = batch_statistics(samples, version=version, correct_reward=self._config.rollout.reward.correct)
        tickets = sorted({sample.ticket_id for sample in samples})
        told = time.perf_counter()
        await self._manager.trained(
            step=step, version=step, trained=tickets, dropped=[], staleness=statistics["staleness"]["histogram"]
        )
        await self.clear([sample.sample_id for sample in samples])
        end = time.perf_counter()
        inference, training = results.get("actor_inf"), results["actor_train"]
        seconds = {
            "wait": waited - begin,
            "inf": inference.seconds if inference else 0.0,
            "train": training.seconds,
            "save": times["save"],
            "publish": times["publish"] + end - told,
            "total": end - begin,
        }
        inference_stats = {f"inf/{key}": value for key, value in inference.stats.items()} if inference else {}
        self._log.append(
            {
                "kind": "train",
                "time": time.time(),
                "step": step,
                "total": self._total_steps,
                "version": step,
                "seconds": seconds,
                "dropped_stale": dropped,
                "train_tokens_per_s": statistics["tokens"] / max(1e-9, seconds["inf"] + seconds["train"]),
                "consumed_tokens_per_s": statistics["answer_tokens"] / max(1e-9, seconds["total"]),
                "lr": rate,
                "stats": {**training.stats, **inference_stats},
                **statistics,
            }
        )

    async def _next_batch(self, version: int) -> tuple[list[list[SampleMeta]], int]:
        """Wait for a batch's worth of groups inside the staleness bound; the too old are given back to the manager.

        Raises WaitTimeout naming what the manager is waiting for when no group arrives for ``request_timeout_s``.
        """
        asynchronous, batch_groups = self._config.asynchronous, self._config.train.batch_groups
        dropped = 0
        while True:
            batch = self._buffer.take(
                batch_groups, version, asynchronous.max_head_offpolicyness, asynchronous.stale_policy
            )
            if batch.dropped:
                dropped += len(batch.dropped)
                await self._manager.trained(
                    step=version, version=version, trained=[], dropped=batch.dropped, staleness={}
                )
                await self.clear(batch.dropped_sample_ids)
            if batch.groups:
                return batch.groups, dropped
            self._arrived.clear()
            if self._buffer.ready_groups >= batch_groups:
                continue
            timeout = self._config.cluster.request_timeout_s
            try:
                await asyncio.wait_for(self._arrived.wait(), timeout)
            except TimeoutError:
                raise WaitTimeout(
                    f"master_worker: step {version + 1} waited {timeout:g} s for a group; it has "
                    f"{self._buffer.ready_groups} of {batch_groups}; the manager says: {await self._manager.explain()}"
                ) from None

    async def clear(self, sample_ids: list[str]) -> None:
        """Free samples wherever they are."""
        holders = self._ownership.forget(sample_ids)
        await self._workers.clear(sorted(holders), sample_ids)

    def _out_of_time(self) -> bool:
        limit = self._config.train.max_seconds
        return bool(limit) and time.monotonic() - self._started > limit


def planned_steps(config: Config, train_prompts: int) -> int:
    """Train steps that the stop conditions `total_steps` and `total_epochs` allow. At least 1."""
    steps = config.train.total_steps
    if config.train.total_epochs:
        steps = min(steps, max(1, config.train.total_epochs * train_prompts // config.train.batch_groups))
    return steps
