"""Runs the calls of one train step, in a run and in a replay.

groups ──plan──> minibatches per role ──> graph of calls ──> results
   └──────────────── recorder ──────────────────┘ record/step-K
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from realsys.algorithm.batch.minibatches import sequence_refs
from realsys.algorithm.batch.sequence_buffer import owners_of
from realsys.cluster.topology import Mesh
from realsys.config.allocation import ACTOR
from realsys.config.dataflow import Dataflow, comparing_call
from realsys.config.schema import Config
from realsys.master.calls.executor import CallResult, GraphExecutor, Minibatches
from realsys.master.calls.model_workers import ModelWorkers
from realsys.master.calls.ownership import Ownership
from realsys.master.records.agreement import AgreementSampler
from realsys.master.records.recorder import Recorder
from realsys.model_calls import SNAPSHOT
from realsys.observe.spans import span
from realsys.types import SampleMeta, SequenceRef

Plan = Callable[[Sequence[SequenceRef]], dict[str, Minibatches]]


class StepRunner:
    """Runner of the train steps of ``flow``. ``recorder`` is None if no step is recorded."""

    def __init__(
        self,
        config: Config,
        flow: Dataflow,
        meshes: Mapping[str, Mesh],
        plan: Plan,
        workers: ModelWorkers,
        recorder: Recorder | None = None,
    ) -> None:
        self.flow = flow
        self.recorder = recorder
        self._plan = plan
        self._workers = workers
        ppo = config.train.ppo
        self._only_critic = without_actor_training(flow)
        weight = ppo.reward_model.weight
        self._executor = GraphExecutor(flow, meshes, workers, score_weight=weight)
        self._critic_executor = GraphExecutor(self._only_critic, meshes, workers, score_weight=weight)
        self._compares = comparing_call(flow)
        self._agreement = AgreementSampler(
            config.agreement.sample_tokens,
            config.asynchronous.max_head_offpolicyness,
            scores_all=self._compares is not None and not self._compares.trains,
        )
        self._critic_steps = ppo.critic.warmup_steps if ppo.critic.enabled else 0

    async def run(
        self, step: int, groups: list[list[SampleMeta]], args: Mapping[str, dict[str, Any]]
    ) -> dict[str, CallResult]:
        """Run the calls of ``step`` on ``groups``: version ``step - 1`` trains. Return their
        results by call name.

        Afterwards no worker holds an array of these samples. Raises as ``GraphExecutor.run`` does.
        """
        ownership = Ownership()
        ownership.add_owners(self.flow.source_keys, owners_of(groups))
        # In a thread: with thousands of rows it takes tens of milliseconds.
        with span("plan", f"step/{step}"):
            plans = await asyncio.to_thread(self._plan, sequence_refs(groups))
        critic_only = step <= self._critic_steps
        flow = self._only_critic if critic_only else self.flow
        if self._compares in flow.calls:
            args = self._with_snapshot(step - 1, groups, plans, args)
        executor = self._critic_executor if critic_only else self._executor
        recording = self.recorder.begin(step, groups, flow, plans, args) if self.recorder else None
        # Workers compare the versions of tokens with this one: the weights that the step starts
        # with.
        results = await executor.run(plans, ownership, step=step, version=step - 1, args=args)
        # Workers serve requests in order: the record must be sent before the request that clears
        # its arrays.
        recorded = [recording.end(results)] if recording else []
        ids = [sample.sample_id for group in groups for sample in group]
        # In a thread, too, for the same reason.
        held = await asyncio.to_thread(ownership.discard_samples, ids)
        await asyncio.gather(self._workers.clear(held), *recorded)
        return results

    def _with_snapshot(
        self,
        version: int,
        groups: Sequence[Sequence[SampleMeta]],
        plans: Mapping[str, Minibatches],
        args: Mapping[str, dict[str, Any]],
    ) -> Mapping[str, dict[str, Any]]:
        """Return the arguments with those of the comparison of engine and trainer, for the actor's first call."""
        if ACTOR not in plans or self._compares is None:
            return args
        name = self._compares.name
        samples = {sample.sample_id: sample for group in groups for sample in group}
        own = [samples[ref.sample_id] for minibatch in plans[ACTOR] for ref in minibatch[0]]
        plan = self._agreement.plan(version, own)
        return args if plan is None else {**args, name: {**args.get(name, {}), SNAPSHOT: msgspec.to_builtins(plan)}}


def without_actor_training(flow: Dataflow) -> Dataflow:
    """Return the graph of a step in which only the critic learns
    (``train.ppo.critic.warmup_steps``).
    """
    return Dataflow([c for c in flow.calls if not (c.trains and c.role == ACTOR)], flow.source_keys)
