"""Steps of the loop: intake, plan, graph, publication, what the manager is told, and what is logged.

Workers are simulated, the manager is its real state machine without HTTP; what writes to disk is a hand-written fake.
"""

import asyncio
from collections import Counter

import msgspec
import pytest

from realsys.algorithm.token_losses import StepLosses
from realsys.config.dataflow import SOURCE_KEYS, dataflow_of
from realsys.errors import NotFiniteError, StuckError, WeightsError
from realsys.model_calls import SNAPSHOT, MaskRequest, SnapshotPlan
from realsys.train.master import intake
from realsys.train.master.executor import CallResult
from realsys.train.master.intake_decisions import FEWEST_FAILURES, FEWEST_FILTERED, StuckCheck
from realsys.train.master.step import CallArguments
from realsys.train.master.step_record import StepWarnings
from realsys.train.master.step_statistics import call_seconds, untrained_shares
from realsys.types import SampleMeta
from tests.support.processes.config_trees import changed
from tests.support.run_logs import undocumented
from tests.support.training.master_fakes import BOUND_S, Run, run

CRITIC = ("train.ppo.critic.enabled=true", "train.ppo.skip_zero_advantage=false", "train.ppo.critic.minibatches=1")


def test_run_trains_publishes_and_clears_the_workers():
    async def body():
        job = Run("train.total_steps=2", "checkpoint.hf_every_steps=2")
        job.manager.state.servers.all()[0].load = {"memory_bytes": 7.0}
        job.arrive(*[(5.0, -5.0)] * 4)
        assert await job.serve(job.train()) == 2
        return job

    job = run(body)
    assert job.disk.wrote == ["v1", "checkpoint 1", "v2", "hf/step-2", "checkpoint 2", "finish"]
    assert [(r["step"], r["version"], r["groups"], r["sequences"]) for r in job.records] == [(1, 1, 2, 4), (2, 2, 2, 4)]
    assert job.records[1]["staleness"]["histogram"] == {"1": 4}
    assert job.versions.kept == [[1], [2]], "versions in use by servers are not pruned"
    assert job.manager.state.ledger.counts.trained == 4
    assert not any(job.workers.held.values())
    snapshots = [call.args.get(SNAPSHOT) for call in job.calls() if call.mfc == "actor_inf"]
    assert snapshots == [None, msgspec.to_builtins(SnapshotPlan(take=True))], "step 2 has tokens of version 0 only"
    seconds = job.records[0]["seconds"]
    assert {"wait", "inf", "train", "save", "publish", "checkpoint", "total"} == set(seconds)
    assert seconds["save"] == 0.25 and seconds["publish"] >= 0.5
    assert set(job.records[0]["call_seconds"]) == {"actor_inf", "actor_train"}
    assert job.records[0]["stats"] == {"inf/rank": 0.0, "rank": 0.0}
    assert job.records[0]["reward_std"] == 5.0 and job.records[0]["sampled_tokens"] > 0
    memory = job.records[0]["memory"]
    assert memory["master_bytes"] > 1 << 20 and memory["server_bytes"] == 7
    assert undocumented(job.records) == {"train: stats/rank", "train: stats/inf/rank"}, "those of the fake workers"


def test_run_resumes_after_steps_of_checkpoint():
    async def body():
        job = Run("train.total_steps=5")
        job.manager.publish(4)
        job.arrive(*[(5.0, -5.0)] * 2)
        assert await job.serve(job.train(4)) == 5
        return job

    job = run(body)
    assert [(r["step"], r["total"]) for r in job.records] == [(5, 5)]
    assert job.disk.wrote == ["v5", "checkpoint 5", "finish"]


def test_only_critic_trains_during_its_warm_up():
    """Each role has its own minibatches and learning rate."""

    async def body():
        job = Run(
            *CRITIC,
            "train.total_steps=2",
            "train.ppo.critic.warmup_steps=1",
            "train.optimizer.lr=0.5",
            "train.optimizer.warmup_fraction=0.0",
            "train.optimizer.schedule=linear",
            "train.optimizer.min_lr_ratio=0.2",
            "roles.critic.optimizer.lr=0.25",
            "roles.critic.optimizer.schedule=constant",
            "roles.critic.optimizer.warmup_fraction=0.5",
            allocation="sglang.d1+actor.d2+critic.m2",
        )
        job.arrive(*[(5.0, -5.0)] * 4)
        await job.serve(job.train())
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


def test_reference_kl_coefficient_follows_reported_kl():
    config = changed("train.ppo.kl.coef=0.1", "train.ppo.kl.target=1.0", "train.ppo.kl.horizon=100")
    arguments = CallArguments(config, dataflow_of(config), 10)
    assert arguments.of_step(1)["ref_inf"] == {}
    assert arguments.of_step(1)["actor_train"]["kl_coef"] == 0.1
    result = CallResult({"kl_ref_mean": 1.1}, {}, 0.0, 0.0, 0.0, 0)
    arguments.observe({"actor_train": result}, episodes=50)
    # 0.1 * (1 + 0.1 * 50 / 100)
    assert arguments.of_step(2)["actor_train"]["kl_coef"] == pytest.approx(0.105)
    resumed = CallArguments(config, dataflow_of(config), 10)
    resumed.load_state_dict(arguments.state_dict())
    assert resumed.of_step(3) == arguments.of_step(3)
    fixed = CallArguments(changed("train.ppo.kl.coef=0.1"), dataflow_of(config), 10)
    fixed.observe({"actor_train": result}, episodes=50)
    assert fixed.of_step(2)["actor_train"]["kl_coef"] == 0.1 and fixed.state_dict() == {}


def test_train_time_is_covered_by_training_calls():
    """The remaining time of the step counts as inference."""

    def result(began, ended):
        return CallResult({}, {}, 0.0, began, ended, 0)

    results = {"inf": result(0, 4), "a": result(4, 7), "b": result(5, 6), "c": result(6.5, 9), "late": result(8, 10)}
    assert call_seconds(results, ["a", "b", "c"]) == {"train": 5, "inf": 5}
    assert call_seconds({"inf": result(1, 4)}, []) == {"train": 0, "inf": 3}


def test_last_step_and_first_steps_are_marked():
    """With eta 1, the tickets of two batches start together."""

    async def body():
        job = Run("train.total_steps=6", "asynchronous.max_staleness=1")
        job.manager.publish(1)
        job.manager.publish(2)
        for _ in range(2):
            job.arrive(*[(5.0, -5.0)] * 8)
        await job.serve(job.train(2))
        return job

    job = run(body)
    assert [(r["step"], r.get("length_biased", False)) for r in job.records] == [
        (3, True), (4, True), (5, False), (6, True)
    ]  # fmt: skip


def test_masked_tokens_are_taken_out_before_step(caplog):
    """All owners of such samples are asked at the same time."""

    async def body():
        job = Run("train.total_steps=1", "asynchronous.stale_policy=mask")
        job.manager.publish(2)
        for owner, (_, samples) in enumerate(job.manager.rollouts(job.config, *[(5.0, -5.0)] * 2)):
            for sample in samples:
                sample.owner = owner
                job.workers.held[owner] |= {(k, sample.sample_id) for k in SOURCE_KEYS}
            samples[0].version_min, samples[0].version_tokens = 0, [(0, 1), (2, 2)]
            job.intake.on_samples(samples)
        await job.serve(job.step(3))
        return job

    job = run(body)
    names = [type(sent.payload).__name__ for sent in job.workers.sent]
    assert names.index("MaskRequest") < names.index("MfcRequest")
    assert [sent.workers for sent in job.workers.sent if isinstance(sent.payload, MaskRequest)] == [[0, 1]]
    assert job.records[0]["untrained"] == {"masked": pytest.approx(2 / 12)}
    assert job.records[0]["answer_tokens"] == 10 and job.manager.told[-1].oldest == [2, 2]
    assert [record.getMessage()[:18] for record in caplog.records] == ["17 % of the tokens"]


def test_tokens_of_failed_episodes_are_untrained():
    """The manager counts them since its start, a step since the step before."""

    async def body():
        job = Run("train.total_steps=3")
        for step in (1, 2, 3):
            job.arrive(*[(5.0, -5.0)] * 2)
            job.manager.state.throughput.lost_tokens["failed"] += 4
            await job.serve(job.step(step))
        return job

    assert [record["untrained"] for record in run(body).records] == [{}, {"failed": 0.25}, {"failed": 0.25}]


def test_verifier_failures_are_counted_by_cause():
    """The manager counts them since its start, and a new manager starts at 0."""

    async def body():
        job = Run("train.total_steps=3")
        for step, counts in enumerate([{"cpu_time": 2}, {"cpu_time": 2, "raised": 1}, {"raised": 1}], 1):
            job.arrive(*[(5.0, -5.0)] * 2)
            job.manager.state.throughput.verdict_failures = Counter(counts)
            await job.serve(job.step(step))
        return job

    records = run(body).records
    assert [record["verdict_failures"] for record in records] == [{"cpu_time": 2}, {"raised": 1}, {"raised": 1}]


def test_step_that_is_not_finite_ends_run():
    async def body():
        job = Run("train.total_steps=1")
        job.workers.report["actor_train"] = {"not_finite": ("actor", 2, ["t/0"])}
        job.arrive(*[(5.0, -5.0)] * 2)
        with pytest.raises(NotFiniteError, match="t/0"):
            await job.serve(job.train())
        return job

    assert run(body).disk.wrote == [], "such weights are not published"


def test_steps_warn_of_weights_and_missing_signal(caplog):
    async def body():
        job = Run("train.total_steps=3")
        job.workers.report["actor_train"] = {"stats": {"w_max": 150.0}}
        for step in (1, 2, 3):
            job.arrive(*[(5.0, 5.0)] * 2)
            await job.serve(job.step(step))

    run(body)
    weights, signal = (record.getMessage() for record in caplog.records)
    assert weights.startswith("step 1 has a token with behaviour weight w = 150")
    assert signal.startswith("100% of the groups of the last 3 steps carry no signal")


def test_untrained_tokens_of_batch_are_named():
    losses = StepLosses(tokens=40, untrained={"stale": 0.25}, too_old=0.0, length_ks=0.0)
    samples = [SampleMeta(f"{k}", "t", 0, 9, 10, 0.0, k == 0, 0, 0, 0) for k in range(3)]
    stats = {"answer_tokens": 20.0, "tokens": 7.0}  # one minibatch of 10 tokens was left out
    shares = untrained_shares(losses, samples, stats, masks_truncated=True)
    assert shares == {"stale": 0.25, "truncated": 0.25, "zero_advantage": 0.075, "skipped_step": 0.25}
    assert untrained_shares(losses, samples, {}, masks_truncated=True) == {"stale": 0.25}
    without_signal = untrained_shares(losses, samples, {"answer_tokens": 30.0}, masks_truncated=False)
    assert without_signal == {"stale": 0.25, "zero_advantage": 0.75}


def test_large_behaviour_weight_is_warned_of_once(caplog):
    warnings = StepWarnings()
    for largest in (2.0, 150.0, 4e8, 3.0):
        warnings.of_weights(7, {"w_max": largest})
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "step 7 has a token with behaviour weight w = 150"
    ]


def test_waste_is_warned_of_once_per_onset(caplog):
    warnings = StepWarnings()
    for share in (0.06, 0.07, 0.01, 0.06):
        warnings.of_waste(StepLosses(1, {}, share, 0.0))
    assert [record.getMessage()[:3] for record in caplog.records] == ["6 %", "6 %"]


# ---- the filter by success rate

FILTER = ("train.ppo.filter.min=0.1", "train.ppo.filter.max=0.9")


def test_filtered_group_frees_its_quota_once():
    """The quota goes to other prompts without a wait for the step."""
    job = Run(*FILTER, "train.total_steps=1")
    ledger = job.manager.state.ledger
    first = job.arrive((5.0, 5.0), (-5.0, -5.0), (5.0, -5.0), (5.0, 5.0))
    assert len(first) == 1 and ledger.counts.filtered() == {"success_rate": 3} and ledger.counted == 1
    others = job.arrive(*[(5.0, -5.0)] * 9)
    assert len(others) == 3, "the quota of three groups, once: 2 groups x (0 + 1 + 1) are out"
    assert ledger.columns.prompt[:7].tolist() == list(dict.fromkeys(ledger.columns.prompt)), "other prompts"


def test_filtered_groups_are_counted_and_never_trained():
    async def body():
        job = Run(*FILTER, "train.total_steps=1")
        kept = job.arrive((5.0, 5.0), (5.0, -5.0), (-5.0, 5.0))
        await job.serve(job.train())
        assert [request.trained for request in job.manager.told if request.trained] == [
            [ticket.ticket_id for ticket in kept]
        ]
        assert job.manager.state.ledger.ended("0000000000") == "dropped: filtered success_rate"
        return job

    job = run(body)
    assert (job.records[0]["dropped_filtered"], job.records[0]["dropped_stale"]) == (1, 0)
    assert not any(job.workers.held.values())


def test_run_with_only_filtered_groups_says_why(monkeypatch):
    monkeypatch.setattr(intake, "_STATUS_INTERVAL_S", 0.01)

    async def body():
        job = Run(*FILTER, "train.total_steps=1", prompts=10)

        async def roll_out():
            while True:
                assert not job.arrive(*[(5.0, 5.0)] * 4)
                await asyncio.sleep(0)

        rolling = asyncio.create_task(roll_out())
        try:
            with pytest.raises(StuckError, match=r"all filtered out, 100% .* filtered success_rate\): widen train.ppo"):
                await job.serve(job.train())
        finally:
            rolling.cancel()
            await asyncio.gather(rolling, return_exceptions=True)

    run(body)


def test_used_up_prompts_end_training_well(monkeypatch, caplog):
    """Two steps are planned of four prompts. One group is filtered out, so the second batch never fills."""
    monkeypatch.setattr(intake, "_STATUS_INTERVAL_S", 0.01)

    async def body():
        job = Run(*FILTER, "train.total_steps=2", prompts=4, epochs=1)
        job.arrive((5.0, -5.0), (5.0, 5.0), (5.0, -5.0), (5.0, -5.0))
        assert await job.serve(job.train()) == 1
        return job

    job = run(body)
    assert job.disk.wrote == ["v1", "checkpoint 1", "finish"]
    end = job.records[-1]
    assert (end["kind"], end["step"]) == ("used_up", 2)
    assert end["reason"].startswith("all 4 groups have ended: 2 trained, 1 dropped (1 x filtered success_rate), 1 left")
    assert "training ends after step 1 of 2" in caplog.text


def test_a_failure_while_giving_back_ends_the_run():
    async def body():
        job = Run("asynchronous.stale_policy=mask", "train.total_steps=1")
        job.intake.state.version = 9  # the group is too old to be trained

        async def refuse(request):
            raise ConnectionError("gone")

        job.manager.trained = refuse  # type: ignore[method-assign]
        job.arrive((5.0, 5.0))
        with pytest.raises(ConnectionError, match="gone"):
            await job.serve(job.train())

    run(body)


# ---- Steps of the loop while the version of the step before is written and published


def test_step_trains_while_a_version_is_written():
    """The step is reported before its version is published, and its checkpoint is due then."""

    async def body():
        job = Run("train.total_steps=2")
        job.versions.holds = True
        job.arrive(*[(5.0, -5.0)] * 4)
        running = asyncio.create_task(job.serve(job.train()))
        await job.versions.awaited.wait()
        assert any(call.step == 2 and call.mfc == "actor_train" for call in job.calls())
        assert job.manager.told[-1].trained and job.disk.wrote == ["checkpoint 1"]
        await _complete_both(job)
        assert await running == 2
        return job

    assert run(body).disk.wrote == ["checkpoint 1", "v1", "checkpoint 2", "v2", "finish"]


async def _complete_both(job):
    """End the publication that runs, and the next one when it has begun."""
    assert await job.versions.begun.get() == 1
    job.versions.complete()
    assert await job.versions.begun.get() == 2
    job.versions.complete()


def test_without_lag_step_waits_for_publication():
    """With eta = 0 the manager grants no ticket of the next batch before it knows the version."""

    async def body():
        job = Run("train.total_steps=2", "asynchronous.max_staleness=0")
        job.versions.holds = True
        assert len(job.arrive(*[(5.0, -5.0)] * 4)) == 2
        running = asyncio.create_task(job.serve(job.train()))
        assert await job.versions.begun.get() == 1
        await job.manager.changed.wait()
        assert job.arrive(*[(5.0, -5.0)] * 2) == []
        job.versions.complete()
        assert [ticket.version for ticket in job.arrive(*[(5.0, -5.0)] * 2)] == [1, 1]
        assert await job.versions.begun.get() == 2
        job.versions.complete()
        assert await running == 2
        assert [record["staleness"]["histogram"] for record in job.records] == [{"0": 4}, {"0": 4}]

    run(body)


def test_failed_write_ends_the_wait_for_groups():
    async def body():
        job = Run("train.total_steps=2")
        job.versions.holds = True
        job.arrive(*[(5.0, -5.0)] * 2)
        running = asyncio.create_task(job.serve(job.train()))
        await asyncio.wait_for(job.manager.changed.wait(), BOUND_S)  # no group is left for step 2
        job.versions.broken.set()
        with pytest.raises(WeightsError, match="No space left on device"):
            await running
        assert "finish" not in job.disk.wrote

    run(body)


@pytest.mark.parametrize("stopped", [False, True], ids=["end", "stop"])
def test_last_checkpoint_waits_for_the_last_version(stopped):
    async def body():
        job = Run("train.total_steps=1" if not stopped else "train.total_steps=5")
        job.versions.holds = True
        job.arrive(*[(5.0, -5.0)] * 2)
        running = asyncio.create_task(job.serve(job.train()))
        await asyncio.wait_for(job.manager.changed.wait(), BOUND_S)
        if stopped:
            job.stop.set()
        await job.versions.awaited.wait()
        assert job.disk.wrote == ["checkpoint 1"]
        job.versions.complete()
        assert await running == 1
        return job.disk.wrote

    assert run(body) == ["checkpoint 1", "v1", "stopped" if stopped else "finish"]


def test_evaluation_starts_after_its_version_is_published(monkeypatch):
    async def body():
        job = Run("train.total_steps=2", "evaluation.every_steps=1")
        seen: list[tuple[str, int]] = []

        async def start(eval_id, step):
            seen.append((eval_id, job.manager.state.version))

        monkeypatch.setattr(job.session, "start_evaluation", start)
        job.versions.holds = True
        job.arrive(*[(5.0, -5.0)] * 4)
        running = asyncio.create_task(job.serve(job.train()))
        await job.versions.awaited.wait()
        assert seen == []
        await _complete_both(job)
        await running
        assert seen == [("step-1", 1)]

    run(body)


# ---- A batch that can never fill is found out, and one that is only slow is not


def status(reason=None, **ledger):
    counts = {"granted": 10, "running": 0, "finished": 0, "waiting": 0, "trained": 4, "dropped": 0}
    return {"admission": {"reason": reason}, "ledger": {**counts, "dropped_by_reason": {}, **ledger}}


def test_exhausted_data_says_what_became_of_groups():
    check = StuckCheck(4, 10)
    ended = status("exhausted", finished=3, dropped=3, dropped_by_reason={"failed RewardError": 3})
    assert check.check(ended, ready=3) is None  # its notice may be on the way
    reason = check.check(ended, ready=3)
    assert reason is not None and "3 x failed RewardError" in reason and "fewer than the 4 of a batch" in reason


def test_exhausted_data_after_training_is_an_end():
    """Also if so many groups were filtered out at the end that a run with further prompts would be stuck."""
    for trained, is_end in ((0, False), (4, True)):
        check = StuckCheck(4, 10)
        assert check.check(status(trained=trained), ready=3) is None
        drops = {"dropped": 999, "dropped_by_reason": {"filtered success_rate": 999}}
        ended = status("exhausted", finished=3, trained=trained, **drops)
        assert check.check(ended, ready=3) is None
        reason = check.check(ended, ready=3)
        assert reason is not None and "999 x filtered success_rate" in reason
        assert check.is_end is is_end and ("add prompts" in reason) is not is_end


def test_exhausted_data_waits_for_outstanding_groups():
    """Outstanding groups run, wait in the buffer or are in transit."""
    for open_ in ({"running": 1}, {"waiting": 1}, {"finished": 2}):
        check = StuckCheck(4, 10)
        assert [check.check(status("exhausted", **open_), ready=1) for _ in range(3)] == [None] * 3


def test_staleness_servers_and_scripts_are_waited_for():
    check = StuckCheck(4, 10)
    reasons = ("staleness", "no_server", "nothing_submitted", None) * 2
    assert [check.check(status(reason), ready=0) for reason in reasons] == [None] * 8


def test_only_failing_groups_end_the_wait():
    """Groups that were dropped earlier do not count."""
    check = StuckCheck(4, 10)
    assert check.check(status(dropped=500), ready=0) is None
    assert check.check(status(dropped=500 + FEWEST_FAILURES - 1), ready=0) is None
    failures = {"dropped_by_reason": {"failed RewardError": 532}, "last_failure": "KeyError: 'word' at mine.py:4"}
    reason = check.check(status(dropped=500 + FEWEST_FAILURES, **failures), ready=0)
    assert reason is not None and "532 x failed RewardError; the last one: KeyError: 'word' at mine.py:4" in reason


def filtered(groups):
    return status(dropped=groups, dropped_by_reason={"filtered success_rate": groups - 1, "filtered equal_rewards": 1})


def test_filtered_groups_are_no_failures():
    check = StuckCheck(4, 10)
    assert check.check(status(), ready=0) is None
    assert [check.check(filtered(4 * FEWEST_FAILURES - 1), ready=0) for _ in range(2)] == [None] * 2
    assert check.warning() == ""


def test_filter_that_keeps_nothing_warns_then_ends():
    check = StuckCheck(4, 10)
    assert check.check(filtered(100), ready=0) is None
    assert check.check(filtered(100 + FEWEST_FILTERED // 2), ready=0) is None
    warning = check.warning()
    assert f"the last {FEWEST_FILTERED // 2} groups" in warning and "98% of all groups" in warning
    assert check.warning() == "", "it is said once"
    reason = check.check(filtered(100 + FEWEST_FILTERED), ready=0)
    assert reason is not None and "train.ppo.filter" in reason and "x filtered success_rate" in reason


def test_large_batch_may_filter_more_groups():
    """A large batch meets more of them by chance."""
    check = StuckCheck(512, 2)
    assert [check.check(filtered(n), ready=0) for n in (1, 1024)] == [None, None]
    assert check.check(filtered(1025), ready=0) is not None
