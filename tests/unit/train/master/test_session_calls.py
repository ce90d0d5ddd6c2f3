"""The calls of a training script: by hand they are what the built-in loop does, and a wrong order is refused by name.

Workers are simulated, the manager is its real state machine without HTTP; what writes to disk is a hand-written fake.
"""

import asyncio
import threading

import numpy as np
import pytest

from realsys.errors import ConfigError, ScriptError, SessionLost, StaleBatch, Stopped, TooFewGroups
from realsys.session import BatchInfo, Rollout, Submitted, name_of
from tests.support.training.master_fakes import Run, run

CRITIC = ("train.ppo.critic.enabled=true", "train.ppo.skip_zero_advantage=false")
REFERENCE = ("train.ppo.kl.coef=0.1",)


def trained_by(script, *settings, batches=1, done=0):
    """Run ``script`` on ``batches`` batches that have arrived; return the job."""

    async def body():
        job = Run("train.total_steps=2", *settings)
        job.arrive(*[(5.0, -5.0)] * (2 * batches))
        await job.serve(job.train(done, script))
        return job

    return run(body)


def by_hand(session):
    for _ in session.steps():
        batch = session.rollout.prepare_batch()
        session.compute(
            batch, "actor.logprobs", "actor.logprobs", *(["ref.logprobs"] if session.config.train.ppo.kl.coef else [])
        )
        if session.config.train.ppo.critic.enabled:
            session.critic.values(batch)
            session.advantages(batch)
            session.critic.train(batch)
        session.actor.train(batch)
        session.publish()


@pytest.mark.parametrize("settings", [(), REFERENCE, CRITIC], ids=["plain", "reference", "critic"])
def test_calls_by_hand_are_those_of_the_dataflow(settings):
    def update(session):
        for _ in session.steps():
            session.update(session.rollout.prepare_batch())
            session.publish()

    jobs = [trained_by(script, *settings, batches=2) for script in (by_hand, update)]
    calls = [
        {(c.step, c.mfc): (c.version, c.minibatches, c.args, sorted(c.inputs), c.outputs) for c in job.calls()}
        for job in jobs
    ]
    assert calls[0] == calls[1] and {step for step, _ in calls[0]} == {1, 2}
    assert [r["tickets"] for r in jobs[0].records] == [r["tickets"] for r in jobs[1].records]
    assert jobs[0].disk.wrote == jobs[1].disk.wrote == ["v1", "checkpoint 1", "v2", "checkpoint 2", "finish"]
    assert not any(jobs[0].workers.held.values()), "freed when the step is published"


def test_script_sees_metadata_and_takes_a_part():
    seen = {}

    def best(session):
        [step] = [next(session.steps())]
        batch = session.rollout.prepare_batch()
        seen["rewards"], seen["groups"], seen["versions"] = batch.rewards, batch.groups, batch.versions
        part = batch.select([max(rows, key=lambda row: batch.rewards[row]) for rows in batch.groups])
        other = batch.select(rewards=-batch.rewards)
        seen["part"], seen["other"] = part.rewards, other.rewards
        session.actor.train(part, loss="reinforce", skip_zero_advantage=False, minibatches=1, lr=0.5)
        session.log(best=1.5)
        assert session.publish() == step == 1

    job = trained_by(best)
    assert seen["rewards"].tolist() == [5, -5, 5, -5] and seen["groups"] == [[0, 1], [2, 3]]
    assert seen["versions"].dtype == np.int64 and seen["part"].tolist() == [5, 5]
    assert seen["other"].tolist() == [-5, 5, -5, 5]
    [call] = job.calls()
    assert [len(part) for part in call.minibatches[0]] == [1, 1] and len(call.minibatches) == 1
    assert call.args["lr"] == 0.5 and call.args["ppo"]["loss"] == "reinforce"
    assert job.records[0]["script"] == {"best": 1.5} and len(job.records[0]["tickets"]) == 2
    assert not any(job.workers.held.values()), "the rows that were not trained are freed, too"


def test_several_batches_make_one_version():
    def script(session):
        for _ in session.steps():
            for _ in range(2):
                batch = session.rollout.wait(1)
                session.actor.train(batch)
            session.publish()

    job = trained_by(script, batches=2)
    assert [len(r["tickets"]) for r in job.records] == [2, 2]
    assert {"actor_train", "actor_train#2"} <= job.records[0]["call_seconds"].keys()
    assert job.manager.state.ledger.counts.trained == 4


def test_batch_that_was_kept_too_long_is_refused():
    def script(session):
        steps = session.steps()
        next(steps)
        kept, batch = session.rollout.wait(1), session.rollout.wait(1)
        session.actor.train(batch)
        session.publish()
        next(steps)
        with pytest.raises(StaleBatch, match="max_staleness=0 versions behind .*allow_stale=True"):
            session.actor.train(kept)
        session.actor.train(kept, allow_stale=True)
        session.publish()

    job = trained_by(script, "asynchronous.max_staleness=0")
    assert [r["staleness"]["max"] for r in job.records] == [0, 1]


def test_dropped_batch_ends_its_tickets():
    def script(session):
        next(session.steps())
        batch = session.rollout.prepare_batch()
        batch.drop("too easy: all right")
        with pytest.raises(ConfigError, match="dropped: prepare another one"):
            session.actor.train(batch)

    job = trained_by(script)
    assert job.manager.state.ledger.counts.dropped_by_reason == {"script": 2}
    assert not any(job.workers.held.values()) and job.disk.wrote == ["finish"]


def test_wrong_orders_and_names_are_refused():
    def script(session):
        steps = session.steps()
        next(steps)
        for call, problem in {
            lambda: session.publish(): "no call has trained since the last publication",
            lambda: session.ref: None,
            lambda: session.rollout.wait(0): "must be at least 1",
        }.items():
            if problem:
                with pytest.raises(ConfigError, match=problem):
                    call()
        batch = session.rollout.prepare_batch()
        for call, problem in {
            lambda: session.ref.logprobs(batch): "loads the role ref: set train.ppo.kl.coef",
            lambda: session.compute(batch, "actor.rewards"): "unknown call: use one of actor.logprobs",
            lambda: session.actor.train(batch, epsilon=1): r"train.ppo.epsilon=1: unknown field",
            lambda: session.actor.train(batch, minibatches=0): r"train.ppo.minibatches=0: Input should be greater",
            lambda: session.actor.train(batch, loss="fancy"): "unknown loss",
            lambda: batch.select(rewards=[1.0]): "must be one for each of the 4 rows",
            lambda: batch.select([0], rewards=[float("nan")]): "must be finite",
            lambda: batch.rows(["values"]): "the batch has behav_logprobs",
            lambda: session.teacher: None,
        }.items():
            if problem:
                with pytest.raises(ConfigError, match=problem):
                    call()
        with pytest.raises(AttributeError, match="roles are actor, ref"):
            _ = session.teacher
        session.actor.train(batch)
        with pytest.raises(ConfigError, match="has trained in this step, and not published it"):
            next(steps)
        with pytest.raises(ConfigError, match="one batch a step"):
            session.update(batch)

    job = trained_by(script)
    assert job.disk.wrote == ["v1", "checkpoint 1", "finish"], "a step that was trained is published at the end"


def test_wait_ends_after_its_time_and_keeps_what_has_arrived():
    def script(session):
        next(session.steps())
        with pytest.raises(TooFewGroups, match=r"3 groups did not arrive within 0\.01 s"):
            session.rollout.wait(3, timeout=0.01)
        assert len(session.rollout.wait(2).groups) == 2

    trained_by(script)


def test_async_form_runs_calls_at_the_same_time():
    async def script(session):
        async for _ in session.steps():
            batch = await session.rollout.prepare_batch()
            assert len(batch) == 4 and batch.rewards.tolist() == [5, -5, 5, -5]
            await asyncio.gather(session.actor.logprobs(batch), session.ref.logprobs(batch))
            await session.actor.train(batch)
            await session.publish()

    job = trained_by(script, *REFERENCE, batches=2)
    assert {c.mfc for c in job.calls()} == {"actor_inf", "ref_inf", "actor_train"} and len(job.records) == 2


def test_exception_of_the_script_has_its_place():
    def script(session):
        next(session.steps())
        raise ValueError("my mistake")

    with pytest.raises(ScriptError, match=r"^mine: ValueError: my mistake \(.*test_session_calls\.py:\d+\)$") as caught:
        trained_by(script)
    assert caught.value.permanent


def test_stop_ends_script_at_its_next_call_but_not_within_an_update():
    """A step whose weights have changed goes on to its publication; else the checkpoint would lack its tickets."""

    async def body():
        job = Run("train.total_steps=5", *CRITIC, "train.ppo.critic.minibatches=1")
        job.arrive(*[(5.0, -5.0)] * 4)
        loop = asyncio.get_running_loop()
        ended = []

        def script(session):
            try:
                for _ in session.steps():
                    batch = session.rollout.prepare_batch()
                    session.critic.values(batch)
                    session.advantages(batch)
                    session.critic.train(batch)
                    loop.call_soon_threadsafe(job.stop.set)
                    session.actor.train(batch)
                    session.publish()
            except Stopped as stopped:
                ended.append(str(stopped))
                raise

        assert await job.serve(job.train(0, script)) == 1
        assert ended == ["the run stops after step 1"]
        return job

    assert run(body).disk.wrote == ["v1", "checkpoint 1", "stopped"]


def test_script_that_hangs_does_not_keep_a_stop_from_saving(monkeypatch):
    monkeypatch.setattr("realsys.train.master.session._LAST_CALL_S", 0.05)

    async def body():
        job = Run("train.total_steps=5")
        job.arrive(*[(5.0, -5.0)] * 2)
        loop, hangs = asyncio.get_running_loop(), threading.Event()

        def script(session):
            next(session.steps())
            session.actor.train(session.rollout.prepare_batch())
            loop.call_soon_threadsafe(job.stop.set)
            hangs.wait(60)

        try:
            assert await job.serve(job.train(0, script)) == 1
        finally:
            hangs.set()
        return job

    assert run(body).disk.wrote == ["v1", "checkpoint 1", "stopped"]


def test_function_is_named_by_its_file():
    assert name_of(by_hand) == f"{__name__}:by_hand"
    with pytest.raises(ConfigError, match="at the top of a file"):
        name_of(lambda inputs: inputs)


# ---- rows of the script


class Trial:
    """What a rollout of a session meets: ``known`` rows were submitted, ``failures`` calls fail after they are done."""

    def __init__(self, known=0):
        self.rows, self.waits, self.failures = [None] * known, 0, 0
        self.queued = self.open = 0

    def call(self, method, *args):
        if method == "prepare":
            self.waits += 1
            self.queued = max(0, self.queued - 2)
            if self.waits % 2:
                raise TooFewGroups("no group")
            return BatchInfo(self.waits, 0, [])
        assert method == "submit"
        self.rows += [row for row, _ in args[0]]
        self.queued += len(args[0])
        if args[0] and self.failures:
            self.failures -= 1
            raise SessionLost("the trainer was started anew")
        return Submitted(len(self.rows), self.queued, self.open)


def test_rows_of_data_are_submitted_as_they_are_needed_and_once():
    trial, data = Trial(), [{"prompt": str(number)} for number in range(11)]
    rollout = Rollout(trial.call, batch_groups=2)
    trial.failures = 1
    with pytest.raises(SessionLost):
        rollout.prepare_batch(data)
    assert trial.rows == data[:4], "two batches"
    assert rollout.prepare_batch(data) is not None
    again = Rollout(trial.call, batch_groups=2)  # another start of the script, with a generator of the same rows
    rows = (dict(row) for row in data)
    while again.prepare_batch(rows) is not None:
        trial.open = 0
    assert trial.rows == data


def test_row_that_was_pulled_and_not_submitted_is_submitted_later():
    trial, data = Trial(), list(range(6))
    refuse = [True]

    def call(method, *args):
        if method == "submit" and args[0] and refuse.pop():
            refuse.append(False)
            raise SessionLost("before it was done")
        return trial.call(method, *args)

    rollout, rows = Rollout(call, batch_groups=1), iter(data)
    with pytest.raises(SessionLost):
        rollout.prepare_batch(rows)
    refuse[:] = [False] * 99
    while rollout.prepare_batch(rows) is not None:
        pass
    assert trial.rows == data


def test_submission_needs_the_order_of_the_script():
    def script(session):
        with pytest.raises(ConfigError, match="data.order='shuffled': .*set data.order=script"):
            session.rollout.submit(3)

    trained_by(script)
