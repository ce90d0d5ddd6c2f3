"""Runs the calls of a train step, in a run and in a replay: all of the dataflow, or those that a script asks for.

groups ──plan──> minibatches per role ──> graph of calls ──> results
   └──────────────── recorder ──────────────────┘ record/step-K
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from realsys.algorithm.balance import CostFunction, cost_function
from realsys.algorithm.kl import AdaptiveKL
from realsys.algorithm.minibatches import plan_minibatches, rows_left_out, sequence_refs
from realsys.algorithm.sequence_buffer import owners_of
from realsys.cluster.topology import Mesh
from realsys.config.allocation import ACTOR
from realsys.config.dataflow import (
    Dataflow,
    FunctionCall,
    advantages_by_token,
    comparing_call,
    is_supervised,
    role_settings,
)
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config, WarmupConfig
from realsys.config.schema_train import OptimizerConfig
from realsys.model_calls import PPO, SNAPSHOT
from realsys.model_files.config_json import read_sizes
from realsys.observe.spans import span
from realsys.train.master.executor import CallResult, GraphExecutor, Minibatches, Ownership
from realsys.train.master.learned_rows import LearnedRows
from realsys.train.master.model_workers import ModelWorkers
from realsys.train.master.recorder import StepRecorder, check_finite
from realsys.train.master.step_statistics import SAMPLE_TOKENS, AgreementSampler, StepLog
from realsys.types import SampleMeta, SequenceRef

#: (rows, other values of fields of ``train.ppo``) -> role -> its minibatches
Plan = Callable[[Sequence[SequenceRef], Mapping[str, Any]], dict[str, Minibatches]]


@dataclass(slots=True)
class HeldBatch:
    """Rows of a batch on the workers: who holds which array, and what the calls on them have made so far.

    A part of a batch has other ``groups`` and shares the rest.
    """

    groups: list[list[SampleMeta]]
    ownership: Ownership
    keys: set[str]
    scores: dict[str, float] = field(default_factory=dict)
    compared: bool = False  # a call has compared engine and trainer on it

    @property
    def sample_ids(self) -> list[str]:
        return [sample.sample_id for group in self.groups for sample in group]


class StepRunner:
    """Runner of the calls of train steps. ``recorder`` is None if no step is recorded."""

    def __init__(
        self,
        config: Config,
        flow: Dataflow,
        meshes: Mapping[str, Mesh],
        plan: Plan,
        workers: ModelWorkers,
        recorder: StepRecorder | None = None,
    ) -> None:
        self.flow = flow
        self.recorder = recorder
        self._meshes = meshes
        self._plan = plan
        self._workers = workers
        ppo = config.train.ppo
        # ``train.ppo.critic.warmup_steps``
        self._only_critic = Dataflow([c for c in flow.calls if not (c.trains and c.role == ACTOR)], flow.source_keys)
        self._score_weight = ppo.reward_model_weight
        compares = comparing_call(flow)
        self._agreement = AgreementSampler(
            config.asynchronous.max_staleness,
            SAMPLE_TOKENS if config.train.engine_check else 0,
            scores_all=compares is not None and not compares.trains,
        )
        self._critic_steps = ppo.critic.warmup_steps if ppo.critic.enabled else 0

    def hold(self, groups: list[list[SampleMeta]]) -> HeldBatch:
        """Return the batch of ``groups``, of which the workers hold what has arrived."""
        ownership = Ownership()
        ownership.add_owners(self.flow.source_keys, owners_of(groups))
        return HeldBatch(groups, ownership, set(self.flow.source_keys))

    async def run(self, step: int, batch: HeldBatch, args: Mapping[str, dict[str, Any]]) -> dict[str, CallResult]:
        """Run all calls of ``step`` on a batch: version ``step - 1`` trains. Return their
        results by call name.

        Afterwards no worker holds an array of these samples. Raises as ``GraphExecutor.run`` does.
        """
        flow = self._only_critic if step <= self._critic_steps else self.flow
        plans = await self._planned(step, batch, {})
        args = self._compared(step, batch, flow, plans, args)
        recording = self.recorder.begin(step, batch.groups, flow, plans, args) if self.recorder else None
        results = await self._executor(flow).run(plans, batch.ownership, step=step, version=step - 1, args=args)
        # Workers serve requests in order: the record must be sent before the request that clears
        # its arrays.
        recorded = [recording.end(results)] if recording else []
        await asyncio.gather(self.clear(batch), *recorded)
        batch.keys.clear()
        return results

    async def call(
        self, step: int, batch: HeldBatch, flow: Dataflow, args: Mapping[str, dict[str, Any]]
    ) -> dict[str, CallResult]:
        """Run the calls of ``flow`` on a batch, and keep its arrays: others may run at the same time."""
        settings: dict[str, Any] = next((own[PPO] for own in args.values() if PPO in own), {})
        plans = await self._planned(step, batch, settings)
        args = self._compared(step, batch, flow, plans, args)
        executor = self._executor(flow)
        results = await executor.run(
            plans, batch.ownership, step=step, version=step - 1, args=args, scores=batch.scores
        )
        for call in flow.calls:
            batch.keys |= call.outputs
            batch.scores |= results[call.name].scores
        return results

    async def clear(self, batch: HeldBatch) -> None:
        """Free all arrays of the batch on all workers."""
        if any(batch.ownership.owners.values()):
            held = await asyncio.to_thread(batch.ownership.discard_samples, batch.sample_ids)
            await self._workers.clear(held)

    async def _planned(self, step: int, batch: HeldBatch, settings: Mapping[str, Any]) -> dict[str, Minibatches]:
        # In a thread: with thousands of rows it takes tens of milliseconds.
        with span("plan", f"step/{step}"):
            return await asyncio.to_thread(self._plan, sequence_refs(batch.groups), settings)

    def _executor(self, flow: Dataflow) -> GraphExecutor:
        return GraphExecutor(flow, self._meshes, self._workers, score_weight=self._score_weight)

    def _compared(
        self,
        step: int,
        batch: HeldBatch,
        flow: Dataflow,
        plans: Mapping[str, Minibatches],
        args: Mapping[str, dict[str, Any]],
    ) -> Mapping[str, dict[str, Any]]:
        """Return the arguments with those of the comparison of engine and trainer, for the actor's first call.

        Workers compare the versions of tokens with ``step - 1``: the weights that the step starts with.
        """
        compares = comparing_call(flow)
        if ACTOR not in plans or compares is None or batch.compared:
            return args
        batch.compared = True
        samples = {sample.sample_id: sample for group in batch.groups for sample in group}
        own = [samples[ref.sample_id] for minibatch in plans[ACTOR] for ref in minibatch[0]]
        plan = self._agreement.plan(step - 1, own)
        name = compares.name
        return args if plan is None else {**args, name: {**args.get(name, {}), SNAPSHOT: msgspec.to_builtins(plan)}}


# ---- supervised warm-up: another dataflow graph on the same ModelWorkers


@dataclass(frozen=True, slots=True)
class WarmupParts:
    """The collaborators of a Warmup.

    ``executor`` runs the supervised graph, ``mesh`` and ``cost`` are the actor's.
    """

    rows: LearnedRows
    mesh: Mesh
    cost: CostFunction
    workers: ModelWorkers
    executor: GraphExecutor
    step_log: StepLog


class Warmup:
    """The supervised steps before training: ``config.steps`` steps over demonstrations."""

    def __init__(self, config: WarmupConfig, parts: WarmupParts) -> None:
        self._config = config
        self._parts = parts

    async def run(self) -> None:
        """Run all steps.

        Raises what a worker raised; then no request of the warm-up is still awaited.
        """
        try:
            for step in range(self._config.steps):
                await self._step(step, await self._parts.rows.take(step, self._config.steps - 1))
        finally:
            await self._parts.rows.close()

    async def _step(self, step: int, groups: list[list[SampleMeta]]) -> None:
        start = time.perf_counter()
        samples = [sample for group in groups for sample in group]
        ownership = Ownership()
        ownership.add_owners(["tokens", "loss_mask"], owners_of(groups))
        refs = sequence_refs(groups)
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


# ---- plans who works on what in a step: the same minibatches for every role, spread over the data ranks of its mesh


def cost_functions(config: Config, paths: TrialPaths, roles: Sequence[str]) -> dict[str, CostFunction]:
    """Return for each role the cost of its sequences.

    Raises ModelError for a model directory without its sizes.
    """
    settings = {role: role_settings(config, role) for role in roles}
    return {role: cost_function(config, read_sizes(s.model_dir(paths), s.head)) for role, s in settings.items()}


def plan_roles(
    config: Config,
    meshes: Mapping[str, Mesh],
    costs: Mapping[str, CostFunction],
    refs: Sequence[SequenceRef],
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Minibatches]:
    """Return role -> ``plan[minibatch][data rank]``. ``settings``: other values of fields of ``train.ppo``.

    A call that only infers runs its role's whole plan in one pass. The actor's plan balances the work of
    the rows that it computes. With a reward model the rewards are not known yet, so nothing is left out.
    """
    config = config.with_ppo(settings) if settings else config
    ppo = config.train.ppo
    left_out: set[str] = set()
    if not ppo.reward_model_weight and not is_supervised(config):
        max_new_tokens = config.generation.sampling.max_new_tokens
        left_out = rows_left_out(refs, ppo, max_new_tokens, by_token=advantages_by_token(config))
    return {
        role: plan_minibatches(
            refs,
            ppo.critic.minibatches if role == "critic" else ppo.minibatches,
            mesh.layout.data,
            costs[role],
            capacity=config.train.microbatch_tokens,
            left_out=left_out if role == ACTOR else (),
        )
        for role, mesh in meshes.items()
    }


# ---- learning rates and the KL coefficient of each call


REFERENCE = "ref_logprobs"  # a call that reads this key weighs the KL to the reference
REFERENCE_KL = "kl_ref_mean"  # statistic of such a call: the KL per completion token, mean


class CallArguments:
    """The arguments of the calls of a step.

    ``lr`` for every call that trains, from its role's schedule over the whole run; ``kl_coef`` for
    every call that reads the reference's log-probs.
    """

    def __init__(self, config: Config, flow: Dataflow, total_steps: int) -> None:
        kl = config.train.ppo.kl
        self._flow = flow
        self._total_steps = total_steps
        self._adaptive = kl.target > 0
        self._config = config
        self._kl = AdaptiveKL(kl.coef, kl.target, kl.horizon)

    def of_step(self, step: int) -> dict[str, dict[str, Any]]:
        """Return call name -> arguments for train step ``step`` (the first is 1)."""
        return self.of_calls(step, self._flow.calls)

    def of_calls(self, step: int, calls: Iterable[FunctionCall]) -> dict[str, dict[str, Any]]:
        """Return the same for ``calls``."""
        args: dict[str, dict[str, Any]] = {}
        for call in calls:
            args[call.name] = {}
            if call.trains:
                # The schedule counts steps from 0, the loop from 1.
                settings = role_settings(self._config, call.role).optimizer
                args[call.name]["lr"] = learning_rate(settings, step - 1, self._total_steps)
            if REFERENCE in call.inputs:
                args[call.name]["kl_coef"] = self._kl.coef
        return args

    def observe(self, results: Mapping[str, CallResult], episodes: int) -> None:
        """Update the adaptive KL coefficient with the results of a step of ``episodes`` episodes."""
        reported = [r.stats[REFERENCE_KL] for r in results.values() if REFERENCE_KL in r.stats]
        if self._adaptive and reported:
            self._kl.update(reported[0], episodes)

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint: an adaptive coefficient.

        Learning rates follow from the step alone.
        """
        return self._kl.state_dict() if self._adaptive else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state.

        A fixed coefficient, and one that was fixed when the state was saved, keeps its configured
        value.
        """
        if self._adaptive and state:
            self._kl.load_state_dict(state)


# ---- the learning rate as a function of the step
#
# The master owns it and sends it with each train call.


def learning_rate(cfg: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of train step ``step`` (0 is the first) of ``total_steps``.

    Linear warm-up over ``ceil(warmup_fraction * total_steps)`` steps: the first step has a rate above 0, the
    last one of the warm-up the full rate. Then ``constant``, or ``linear`` / ``cosine`` decay that reaches
    ``min_lr_ratio * lr`` at the last step. Steps beyond ``total_steps`` keep the last rate. Raises
    ValueError if ``step`` or ``total_steps`` is too small.
    """
    if step < 0 or total_steps < 1:
        raise ValueError(f"step {step} of {total_steps} steps: step must be at least 0, total_steps at least 1")
    # Rounded first: 0.07 * 100 is 7.000000000000001, which must give 7 steps, not 8.
    warmup = math.ceil(round(cfg.warmup_fraction * total_steps, 6))
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    if cfg.schedule == "constant":
        return cfg.lr
    decay_steps = total_steps - warmup
    progress = min(1.0, (step - warmup + 1) / decay_steps) if decay_steps > 0 else 1.0
    remaining = 1.0 - progress if cfg.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return cfg.lr * (cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * remaining)
