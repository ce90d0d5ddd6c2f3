"""Which learning rate, version and rows a step's calls get, and how the staleness of mixed samples is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from realsys.algorithm import dataflows
from realsys.algorithm.balance import token_costs
from realsys.algorithm.token_losses import mask_group
from realsys.cluster.topology import place, whole_mesh
from realsys.config.allocation import ACTOR, ParallelLayout, parse_allocation
from realsys.model_calls import MfcRequest, SamplesArrived
from realsys.train.master.executor import GraphExecutor
from realsys.train.master.step import Warmup, WarmupParts, plan_roles
from realsys.train.master.step_statistics import batch_statistics
from realsys.types import SampleMeta
from tests.support.processes.config_trees import changed
from tests.support.streams.simulated_workers import SimulatedWorkers
from tests.support.training.master_fakes import Run, run
from tests.support.training.sample_records import make_ref

STEPS = 5

# ceil(0.4 * 5) = 2 steps of warm-up, then a cosine over 3: 0.1 + 0.9 * (1 + cos(pi * k / 3)) / 2
RATES = [0.5, 1.0, 0.775, 0.325, 0.1]


def schedule(section: str) -> list[str]:
    fields = {"lr": 1.0, "warmup_fraction": 0.4, "schedule": "cosine", "min_lr_ratio": 0.1}
    return [f"{section}.{name}={value}" for name, value in fields.items()]


def train_five_steps() -> Run:
    async def body() -> Run:
        job = Run(
            *schedule("train.optimizer"),
            f"train.total_steps={STEPS}",
            f"asynchronous.max_staleness={STEPS}",
        )
        job.arrive(*[(5.0, -5.0)] * (2 * STEPS))
        assert await job.serve(job.loop.run()) == STEPS
        return job

    finished: Run = run(body)
    return finished


def test_train_rates_match_table() -> None:
    job = train_five_steps()
    rates = {call.step: call.args["lr"] for call in job.calls() if call.mfc == "actor_train"}
    assert sorted(rates) == [1, 2, 3, 4, 5]
    assert [rates[step] for step in sorted(rates)] == pytest.approx(RATES)
    assert [record["lr"] for record in job.records] == pytest.approx(RATES)


def test_calls_get_version_before_step() -> None:
    """Step k trains version k - 1. Workers compare the versions of tokens with it (``agreement/...``)."""
    calls = train_five_steps().calls()
    assert {(call.step, call.version) for call in calls} == {(step, step - 1) for step in range(1, STEPS + 1)}


def test_actor_plan_balances_computed_rows() -> None:
    """Group 0 has no gradient, because its rewards are equal; the critic computes it all the same."""
    rows = [(40, 1.0, 0), (10, 1.0, 0), *((10, float(k % 2), 1) for k in range(4))]
    refs = [make_ref(f"{k}", length, 2, reward, False, group) for k, (length, reward, group) in enumerate(rows)]
    meshes = dict.fromkeys([ACTOR, "critic"], whole_mesh(ParallelLayout(data=2)))
    config = changed("train.ppo.minibatches=1", "train.ppo.critic.minibatches=1")
    plan = plan_roles(config, meshes, dict.fromkeys(meshes, token_costs), refs)
    [actor], [critic] = plan[ACTOR], plan["critic"]
    assert [sum(ref.length for ref in rank if ref.group == 1) for rank in actor] == [20, 20]
    assert sorted(sum(ref.length for ref in rank) for rank in critic) == [40, 50]


class DemoWorkers(SimulatedWorkers):
    """Simulated workers that also load demonstrations."""

    def load_demos(self, head: int, indices: Sequence[int]) -> asyncio.Future[SamplesArrived]:
        samples = []
        for index in indices:
            sample_id = f"demo/{head}/{len(self.held[head])}/{index}"
            samples.append(SampleMeta(sample_id, sample_id, 0, 8, 3, 0.0, False, 0, 0, head))
            self.held[head] |= {(key, sample_id) for key in ("tokens", "loss_mask")}
        future = asyncio.get_running_loop().create_future()
        future.set_result(SamplesArrived(samples))
        return future


def test_warmup_rates_match_table() -> None:
    config = changed(*schedule("warmup.optimizer"), f"warmup.steps={STEPS}", "warmup.batch=4")
    flow, meshes = dataflows.sft(config), place(parse_allocation("serve.d1+d2"), [ACTOR])
    records: list[dict[str, Any]] = []

    async def body() -> list[MfcRequest]:
        workers: Any = DemoWorkers(flow, meshes, 2)
        workers.report = {call.name: {"stats": {"loss": 1.0}} for call in flow.calls}
        executor = GraphExecutor(flow, meshes, workers)
        step_log: Any = records
        parts = WarmupParts(meshes[ACTOR], token_costs, workers, executor, step_log)
        async with workers.serving():
            await Warmup(config.warmup, parts, demos=10, seed=1).run()
        assert not any(workers.held.values())
        return [sent.payload for sent in workers.sent if isinstance(sent.payload, MfcRequest)]

    calls: list[MfcRequest] = run(body)
    assert [call.args["lr"] for call in calls] == pytest.approx(RATES)
    assert [record["lr"] for record in records] == pytest.approx(RATES)


def test_staleness_counts_oldest_token() -> None:
    """Weights changed while two of the three rows were sampled. Version 5 trains on them."""
    spans = [(1, 4), (3, 5), (4, 4)]
    samples = [
        SampleMeta(f"t{i}.0/0.0", f"t{i}", 0, 8, 3, 1.0, False, oldest, newest, 0)
        for i, (oldest, newest) in enumerate(spans)
    ]
    statistics = batch_statistics(samples, version=5)
    assert statistics["staleness"] == {"min": 0, "mean": 7 / 3, "max": 4, "histogram": {"1": 1, "2": 1, "4": 1}}
    assert statistics["interrupted_fraction"] == 2 / 3


def test_kept_keys_are_a_share_of_trained_tokens() -> None:
    samples = [
        SampleMeta(
            f"t{i}.0/0.0", f"t{i}", 0, 8, 4, 1.0, False, 3, 4, 0, version_tokens=[(3, 3), (4, 1)], kept_tokens=kept
        )
        for i, kept in enumerate((0, 3))
    ]
    assert batch_statistics(samples, version=4)["kept_keys_fraction"] == 3 / 8
    masked = mask_group(samples, 4)
    assert [sample.kept_tokens for sample in masked] == [0, 1]


def test_signal_shares_count_groups() -> None:
    """One group is all wrong, one is mixed, one is all right with different rewards."""
    outcomes = {"t0": [(0.0, False), (0.0, False)], "t1": [(0.0, False), (1.0, True)], "t2": [(1.0, True), (2.0, True)]}
    samples = [
        SampleMeta(f"{ticket}.0/{k}.0", ticket, 0, 8, 3, reward, False, 1, 1, 0, episode=k, correct=correct)
        for ticket, group in outcomes.items()
        for k, (reward, correct) in enumerate(group)
    ]
    shares = batch_statistics(samples, version=1)["signal"]
    assert shares == {"wrong": 1 / 3, "right": 1 / 3, "equal": 1 / 3, "batch_equal": 0.0}
