"""Steps of the loop: intake, plan, graph, publication, what the manager is told, and what is logged.

Workers are simulated, the manager is its real state machine without HTTP; what writes to disk is a hand-written fake.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from realsys.admission.manager import ManagerSettings, ManagerState
from realsys.admission.messages import AllocateRequest, Answer, FinishRequest, TrainedReply, TrainedRequest
from realsys.admission.status import status
from realsys.algorithm.group_filter import keep_group
from realsys.buffer.balance import token_costs
from realsys.cluster.topology import place
from realsys.config.allocation import parse_allocation
from realsys.config.dataflow import dataflow_of
from realsys.config.schema import Config
from realsys.errors import StuckError
from realsys.master.arguments import CallArguments
from realsys.master.executor import CallResult
from realsys.master.intake import Intake
from realsys.master.loop import TrainLoop
from realsys.master.plans import plan_roles
from realsys.master.statistics import call_seconds
from realsys.master.stuck import FEWEST_FILTERED
from realsys.types import MfcRequest, PublishedVersion, SampleMeta, ServerAddress, Ticket
from tests.config_trees import changed
from tests.simulated_workers import SimulatedWorkers

BOUND_S = 15.0
SMALL = (
    "rollout.group_size=2",
    "train.batch_groups=2",
    "train.ppo.minibatches=2",
    "asynchronous.max_head_offpolicyness=1",
)
CRITIC = ("train.ppo.critic.enabled=true", "train.ppo.skip_zero_advantage=false", "train.ppo.critic.minibatches=1")


class Manager:
    """The manager's state behind the client's calls, with one server that serves what is published."""

    def __init__(self, config: Config, prompts: int, epochs: int = 0) -> None:
        group, batch = config.rollout.group_size, config.train.batch_groups
        eta = config.asynchronous.max_head_offpolicyness
        settings = ManagerSettings(batch, eta, 0, group, 1, {"train": prompts, "eval": 1}, total_epochs=epochs)
        self.state, self.told = ManagerState(settings), list[TrainedRequest]()
        self.state.observe_servers([ServerAddress("generation_server/0", "http://h:0", 1, "h", "1")])
        self.changed = asyncio.Event()
        self.publish(0)

    def publish(self, version: int) -> None:
        self.state.publish(PublishedVersion(version, "m", f"/v{version}", version))
        order: Any = self.state.servers.next_order("generation_server/0", "1", 0.0)
        assert self.state.begin_update(order, 0.0) and self.state.servers.succeeded(order, 0.1, {"pause_s": 0.0})

    async def trained(self, request: TrainedRequest) -> TrainedReply:
        self.told.append(request)
        reply = self.state.trained(request, 0.0)
        self.changed.set()
        return reply

    async def status(self) -> dict[str, Any]:
        return status(self.state, 0.0)

    def rollouts(self, config: Config, *rewards: Sequence[float]) -> list[tuple[Ticket, list[SampleMeta]]]:
        """As many groups as there are rewards, as far as admission lets them through: generated and accepted."""
        groups = []
        for number, ticket in enumerate(self.state.allocate(AllocateRequest("w", len(rewards)), 0.0).tickets):
            answers = [Answer(r, r > 0, 3, "stop", ticket.version, ticket.version) for r in rewards[number]]
            self.state.finish(FinishRequest(ticket.ticket_id, ticket.attempt, "w", "accepted", "", answers), 0.0)
            groups.append(
                (
                    ticket,
                    [
                        SampleMeta(
                            f"{ticket.ticket_id}/{k}", ticket.ticket_id, 0, 8, 5, r, False, ticket.version,
                            ticket.version, 0,
                        )
                        for k, r in enumerate(rewards[number])
                    ],
                )
            )  # fmt: skip
        return groups


class Disk:
    """Publisher and checkpoints: what was written, in order."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self.wrote: list[str] = []

    async def publish(self, version: int, step: int) -> dict[str, float]:
        self._manager.publish(version)
        self.wrote.append(f"v{version}")
        return {"save": 0.25, "publish": 0.5}

    async def export(self, target: Path) -> None:
        self.wrote.append(str(target))

    async def after_step(self, step: int) -> None:
        assert self._manager.told[-1].version == step, "the ledger must know before a checkpoint says so"
        self.wrote.append(f"checkpoint {step}")

    async def finish(self) -> None:
        self.wrote.append("finish")


class NoEvaluations:
    async def finished(self) -> list[dict[str, Any]]:
        return []


class Run:
    """A loop over simulated workers, and the groups that are to arrive."""

    def __init__(self, *settings: str, allocation: str = "sglang.d1+d2", prompts: int = 100, epochs: int = 0) -> None:
        self.config = config = changed(*SMALL, *settings)
        flow = dataflow_of(config)
        meshes = place(parse_allocation(allocation), dict.fromkeys(["actor", *flow.roles]))
        self.manager, self.records = Manager(config, prompts, epochs), list[dict[str, Any]]()
        self.workers: Any = SimulatedWorkers(flow, meshes, 1 + max(w for m in meshes.values() for w in m.workers))
        self.disk, manager = Disk(self.manager), self.manager
        correct, wanted = config.rollout.reward.correct, config.train.ppo.filter
        self.intake = Intake(
            config,
            keep=lambda group: keep_group([s.reward for s in group], correct, wanted),
            workers=self.workers,
            manager=manager,  # type: ignore[arg-type]
        )
        self.arguments = CallArguments(config, flow, config.train.total_steps)
        parts: Any = {"publisher": self.disk, "manager": manager, "checkpoints": self.disk, "step_log": self.records}
        self.loop = TrainLoop(
            config,
            flow=flow,
            meshes=meshes,
            plan=functools.partial(plan_roles, config, meshes, dict.fromkeys(meshes, token_costs)),
            workers=self.workers,
            intake=self.intake,
            arguments=self.arguments,
            evaluations=NoEvaluations(),  # type: ignore[arg-type]
            show=self._show,
            hf_folder=Path("hf"),
            total_steps=config.train.total_steps,
            **parts,
        )

    async def _show(self, fields: dict[str, Any]) -> None:
        assert fields["step"] == self.records[-1]["step"]

    def arrive(self, *rewards: Sequence[float]) -> list[Ticket]:
        """Groups come in at worker 0."""
        tickets = []
        for ticket, samples in self.manager.rollouts(self.config, *rewards):
            for sample in samples:
                self.workers.held[0] |= {(k, sample.sample_id) for k in ("tokens", "behav_logprobs", "versions")}
            self.intake.on_samples(samples)
            tickets.append(ticket)
        return tickets

    async def serve(self, work: Any) -> Any:
        async with asyncio.timeout(BOUND_S), self.workers.serving():
            return await work

    def calls(self) -> list[MfcRequest]:
        return [sent.payload for sent in self.workers.sent if isinstance(sent.payload, MfcRequest)]


def run(body: Any) -> Any:
    return asyncio.run(asyncio.wait_for(body(), 2 * BOUND_S))


def test_a_run_trains_publishes_tells_and_keeps_and_leaves_nothing_on_the_workers() -> None:
    async def body() -> Run:
        job = Run("train.total_steps=2", "checkpoint.hf_every_steps=2")
        job.arrive(*[(5.0, -5.0)] * 4)
        assert await job.serve(job.loop.run()) == 2
        return job

    job = run(body)
    assert job.disk.wrote == ["v1", "checkpoint 1", "v2", "hf/step-2", "checkpoint 2", "finish"]
    assert [(r["step"], r["version"], r["groups"], r["sequences"]) for r in job.records] == [(1, 1, 2, 4), (2, 2, 2, 4)]
    assert job.records[1]["staleness"]["histogram"] == {"1": 4}
    assert job.manager.state.ledger.counts.trained == 4
    assert not any(job.workers.held.values())
    seconds = job.records[0]["seconds"]
    assert {"wait", "inf", "train", "save", "publish", "checkpoint", "total"} == set(seconds)
    assert seconds["save"] == 0.25 and seconds["publish"] >= 0.5
    assert set(job.records[0]["call_seconds"]) == {"actor_inf", "actor_train"}
    assert job.records[0]["stats"] == {"inf/rank": 0.0, "rank": 0.0}


def test_a_run_goes_on_from_the_steps_that_a_checkpoint_has_done() -> None:
    async def body() -> Run:
        job = Run("train.total_steps=5")
        job.manager.publish(4)
        job.arrive(*[(5.0, -5.0)] * 2)
        assert await job.serve(job.loop.run(4)) == 5
        return job

    job = run(body)
    assert [(r["step"], r["total"]) for r in job.records] == [(5, 5)]
    assert job.disk.wrote == ["v5", "checkpoint 5", "finish"]


def test_only_the_critic_trains_while_it_warms_up_and_each_role_has_its_own_minibatches_and_rate() -> None:
    async def body() -> Run:
        job = Run(
            *CRITIC,
            "train.total_steps=2",
            "train.ppo.critic.warmup_steps=1",
            "train.optimizer.lr=0.5",
            "train.optimizer.warmup_fraction=0.0",
            "train.optimizer.schedule=linear",
            "train.optimizer.min_lr_ratio=0.2",
            "roles.critic.optimizer.lr=0.25",
            "roles.critic.optimizer.warmup_fraction=0.5",
            allocation="sglang.d1+actor.d2+critic.m2",
        )
        job.arrive(*[(5.0, -5.0)] * 4)
        await job.serve(job.loop.run())
        return job

    job = run(body)
    steps = [{c.mfc: c for c in job.calls() if c.step == step} for step in (1, 2)]
    assert set(steps[0]) == {"actor_inf", "critic_inf", "advantages", "critic_train"}
    assert set(steps[1]) == {*steps[0], "actor_train"}
    assert [len(m) for m in (steps[1]["actor_train"].minibatches, steps[1]["critic_train"].minibatches)] == [2, 1]
    assert [len(part) for part in steps[1]["critic_train"].minibatches] == [1], "the critic has one data rank"
    # the actor's rate has fallen to 0.2 of 0.5 by the last step; the critic's is constant after one step of warm-up
    assert steps[1]["actor_train"].args == {"lr": pytest.approx(0.1)}
    assert [step["critic_train"].args for step in steps] == [{"lr": 0.25}, {"lr": 0.25}]
    assert [record["lr"] for record in job.records] == [0.0, pytest.approx(0.1)]
    assert "critic_train/rank" in job.records[0]["stats"] and "rank" not in job.records[0]["stats"]
    assert job.disk.wrote[:2] == ["v1", "checkpoint 1"], "the same weights as a new version: admission goes on"


def test_the_coefficient_of_the_reference_kl_follows_what_the_calls_report() -> None:
    config = changed(
        "train.ppo.kl.coef=0.1", "train.ppo.kl.adaptive=true", "train.ppo.kl.target=1.0", "train.ppo.kl.horizon=100"
    )
    arguments = CallArguments(config, dataflow_of(config), 10)
    assert arguments.of_step(1)["ref_inf"] == {}
    assert arguments.of_step(1)["actor_train"]["kl_coef"] == 0.1
    result = CallResult({"kl_ref_mean": 1.1}, {}, 0.0, 0.0, 0.0, 0)
    arguments.observe({"actor_train": result}, answers=50)
    # 0.1 * (1 + 0.1 * 50 / 100)
    assert arguments.of_step(2)["actor_train"]["kl_coef"] == pytest.approx(0.105)
    resumed = CallArguments(config, dataflow_of(config), 10)
    resumed.load_state_dict(arguments.state_dict())
    assert resumed.of_step(3) == arguments.of_step(3)
    fixed = CallArguments(changed("train.ppo.kl.coef=0.1"), dataflow_of(config), 10)
    fixed.observe({"actor_train": result}, answers=50)
    assert fixed.of_step(2)["actor_train"]["kl_coef"] == 0.1 and fixed.state_dict() == {}


def test_train_time_is_what_training_calls_cover_and_inference_the_rest() -> None:
    def result(began: float, ended: float) -> CallResult:
        return CallResult({}, {}, 0.0, began, ended, 0)

    results = {"inf": result(0, 4), "a": result(4, 7), "b": result(5, 6), "c": result(6.5, 9), "late": result(8, 10)}
    assert call_seconds(results, ["a", "b", "c"]) == {"train": 5, "inf": 5}
    assert call_seconds({"inf": result(1, 4)}, []) == {"train": 0, "inf": 3}


# ---- the filter by success rate

FILTER = ("train.ppo.filter.min=0.1", "train.ppo.filter.max=0.9")


def test_filtered_groups_give_their_quota_to_other_prompts_at_once_and_only_once() -> None:
    async def body() -> None:
        job = Run(*FILTER, "train.total_steps=1")
        ledger = job.manager.state.ledger
        first = job.arrive((5.0, 5.0), (-5.0, -5.0), (5.0, -5.0), (5.0, 5.0))
        assert len(first) == 4 and job.arrive((5.0, -5.0)) == [], "2 groups x (0 + 1 + 1) are out"
        giving = asyncio.create_task(job.serve(job.intake.give_back()))
        try:
            await asyncio.wait_for(job.manager.changed.wait(), BOUND_S)
            assert job.manager.told == [
                TrainedRequest(0, 0, dropped=[(first[i].ticket_id, "success_rate") for i in (0, 1, 3)])
            ]
            assert ledger.counts.dropped_by_reason == {"success_rate": 3}
            again = await job.manager.trained(job.manager.told[0])
            assert (again.dropped, ledger.counted) == (0, 1)
            others = job.arrive(*[(5.0, -5.0)] * 9)
            assert len(others) == 3, "the quota of three groups, once"
            assert {t.prompt_index for t in others}.isdisjoint(t.prompt_index for t in first)
        finally:
            giving.cancel()
            await asyncio.gather(giving, return_exceptions=True)

    run(body)


def test_filtered_groups_are_counted_and_freed_and_never_trained() -> None:
    async def body() -> Run:
        job = Run(*FILTER, "train.total_steps=1")
        filtered, *kept = job.arrive((5.0, 5.0), (5.0, -5.0), (-5.0, 5.0))
        await job.serve(job.loop.run())
        assert [request.trained for request in job.manager.told if request.trained] == [
            [ticket.ticket_id for ticket in kept]
        ]
        assert job.manager.state.ledger.ended(filtered.ticket_id) == "dropped: success_rate"
        return job

    job = run(body)
    assert (job.records[0]["dropped_filtered"], job.records[0]["dropped_stale"]) == (1, 0)
    assert not any(job.workers.held.values())


def test_a_run_whose_groups_are_all_filtered_ends_and_says_why() -> None:
    async def body() -> None:
        job = Run(*FILTER, "train.total_steps=1", prompts=10)

        async def roll_out() -> None:
            while True:
                job.manager.changed.clear()
                if not job.arrive(*[(5.0, 5.0)] * 4):
                    await job.manager.changed.wait()
                await asyncio.sleep(0)

        rolling = asyncio.create_task(roll_out())
        try:
            with pytest.raises(StuckError, match=rf"last {FEWEST_FILTERED}.* \[0\.1, 0\.9\] \(train\.ppo\.filter\)"):
                await job.serve(job.loop.run())
        finally:
            rolling.cancel()
            await asyncio.gather(rolling, return_exceptions=True)

    run(body)


def test_a_failure_while_giving_back_ends_the_run() -> None:
    async def body() -> None:
        job = Run(*FILTER, "train.total_steps=1")

        async def refuse(request: TrainedRequest) -> TrainedReply:
            raise ConnectionError("gone")

        job.manager.trained = refuse  # type: ignore[method-assign]
        job.arrive((5.0, 5.0))
        with pytest.raises(ConnectionError, match="gone"):
            await job.serve(job.loop.run())

    run(body)
