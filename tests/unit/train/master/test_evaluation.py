"""Evaluations as the master asks for them, against the manager's real state; and how it ends when it is stopped."""

import asyncio
import dataclasses
import functools
import itertools
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from realsys.cluster.names.connect import trial_names
from realsys.config.evaluation_sets import evaluation_sets
from realsys.config.paths import TrialPaths
from realsys.errors import Fenced, StreamError, StuckError, WaitTimeout, WeightsError
from realsys.manager.ledger.events import Outcome
from realsys.manager.messages import (
    AllocateRequest,
    Answer,
    ClaimRequest,
    EvaluateRequest,
    EvaluationReply,
    FinishRequest,
    OlderTrainer,
    RollBackReply,
    RollBackRequest,
    TrainedReply,
    TrainedRequest,
)
from realsys.manager.operations import status
from realsys.manager.routing.servers import UpdateOrder
from realsys.observe.evaluation_records import EvalSample, append_sample, headline, read_result, read_samples, record
from realsys.observe.step_log import read_steps
from realsys.reward.pool import AnswerComparer
from realsys.train.master import request_evaluations
from realsys.train.master.recovery import TrainingStart, eval_id_of, unanswered
from realsys.train.master.request_evaluations import EvaluationRequests, EvaluationRun, ResultWriter, outcome_of
from realsys.train.master.run import MasterRun
from realsys.train.master.step_statistics import StepLog
from realsys.types import PublishedVersion
from realsys.weights.disk.plain_folders import verify
from tests.support.ledger.manager_states import ANSWER, ready, update, version
from tests.support.ledger.memory_store import MemoryNameStore
from tests.support.processes.config_trees import changed

BOUND_S = 60.0


class Answering:
    """The manager, and a worker that answers one problem between two questions how far it is."""

    answers: tuple[Answer, ...] = (ANSWER,)

    def __init__(self, state):
        self.state, self.asked, self.looks = state, list[str](), list[int]()
        self._requests = map(str, itertools.count())

    async def evaluate(self, request):
        self.asked.append(request.eval_id)
        try:
            self.state.evaluate(request, 0.0)
        except OlderTrainer as refusal:
            raise Fenced(str(refusal)) from refusal

    async def evaluation(self, eval_id):
        request = AllocateRequest("w", 1, request_id=next(self._requests))
        for ticket in self.state.allocate(request, 0.0).tickets:
            at = ticket.version
            answers = [msgspec.structs.replace(answer, version_min=at, version_max=at) for answer in self.answers]
            outcome: Outcome = "accepted" if answers else "failed"
            reason = "" if answers else "AgentError: stuck"
            self.state.finish(FinishRequest(ticket.ticket_id, ticket.attempt, "w", outcome, reason, answers), 0.0)
        return self.state.evaluations.find(eval_id).reply()

    async def status(self):
        return status(self.state, 0.0, 0.0)

    async def repair(self, status):
        self.looks.append(status["version"])

    def starts(self, step, number):
        """A training side goes back to ``step`` and publishes; the evaluations that were ever asked for."""
        reply = self.state.roll_back(RollBackRequest(step, step, f"{number:019d}"), 0.0)
        assert isinstance(reply, RollBackReply)
        self.publishes(step)
        return reply.evaluations

    def publishes(self, step):
        self.state.servers.publish(PublishedVersion(step, self.state.trainer_incarnation, f"/v{step}", step))
        if isinstance(self.state.next_order("generation_server/0", "1", 0.0), UpdateOrder):  # else it is held
            update(self.state, 0)

    def trains(self, step):
        """One ticket becomes version ``step``."""
        ticket = self.state.ledger.grant("w", "", self.state.version, 0.0)  # not the problem of an evaluation
        self.state.claim(ClaimRequest(step, [ticket.ticket_id], self.state.trainer_incarnation), 0.0)
        told = TrainedRequest(step, step, [ticket.ticket_id], incarnation=self.state.trainer_incarnation)
        assert isinstance(self.state.trained(told, 0.0), TrainedReply)
        self.publishes(step)


class NoWriter:
    """Stores nothing."""

    def write(self, eval_id, made, result, state):
        return result


SETS = evaluation_sets(changed("evaluation.problems=2", "evaluation.every_steps=1"))
HELD_OUT_SET = SETS["eval"]


def evaluations(manager, *settings):
    parts: Any = {"config": changed(*settings), "repair": manager.repair, "writer": NoWriter()}
    return EvaluationRequests(manager, trainer_incarnation=manager.state.trainer_incarnation, **parts)  # type: ignore[arg-type]


def missing(log, asked, done):
    """Return the steps whose evaluation has no result."""
    return [step for _, step in unanswered(log, asked, done, SETS, 100)]


def run(body):
    async def bounded():
        async with asyncio.timeout(2 * BOUND_S):
            await body()

    asyncio.run(bounded())


def test_extended_run_is_evaluated_at_its_new_end():
    async def body():
        manager = Answering(ready())
        [first] = await evaluations(manager).run("after", SETS, 0)
        manager.state.servers.publish(version(1))
        made: Any = manager.state.next_order("generation_server/0", "1", 0.0)
        assert manager.state.begin_update(made, 0.0) and manager.state.servers.succeeded(made, 0.1, {})
        [second] = await evaluations(manager).run("after", SETS, 1)
        assert [(r["eval_id"], r["step"], r["problems"]) for r in (first, second)] == [("after", 0, 2), ("after", 1, 2)]
        assert len(set(manager.asked)) == 2, "the manager answers the same id with what it has"

    run(body)


def test_master_waits_for_evaluations_at_end():
    async def body():
        asking = evaluations(Answering(ready()))
        await asking.start("step-1", HELD_OUT_SET, 2, 1)
        await asking.start("step-2", HELD_OUT_SET, 3, 2)
        records = await asking.finish_all()
        assert sorted((r["eval_id"], r["problems"]) for r in records) == [("step-1", 2), ("step-2", 3)]
        assert await asking.finish_all() == []

    run(body)


def test_evaluation_wait_checks_newest_version(monkeypatch):
    """It may be one that no server can load, and at the end of a run none comes after it."""
    monkeypatch.setattr(request_evaluations, "POLL_S", 0.0)
    monkeypatch.setattr(request_evaluations, "STATUS_INTERVAL_S", -1.0)

    async def body():
        manager = Answering(ready())
        await evaluations(manager).run("after", SETS, 0)
        assert manager.looks and set(manager.looks) == {0}

    run(body)


def test_standstill_of_an_evaluation_is_named(monkeypatch):
    monkeypatch.setattr(request_evaluations, "POLL_S", 0.0)

    async def body():
        manager = Answering(ready(servers=0))
        asking = evaluations(manager, "cluster.request_timeout_s=0.01")
        with pytest.raises(WaitTimeout, match=r"'after-0' has 0 of 2 completions, and no new one for 0.01 s"):
            await asking.run("after", SETS, 0)

    run(body)


def test_long_evaluation_with_progress_goes_on(monkeypatch):
    """The time limit counts from the last completion, however many there are."""
    clock = itertools.count(0.0, 20.0)
    monkeypatch.setattr(request_evaluations, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(request_evaluations, "POLL_S", 0.0)

    async def body():
        asking = evaluations(Answering(ready()), "cluster.request_timeout_s=90")
        await asking.start("step-1", HELD_OUT_SET, 3, 1)
        [record] = await asking.finish_all()
        assert record["problems"] == 3 and record["seconds"] > 90

    run(body)


def test_set_that_waits_its_turn_goes_on(monkeypatch):
    """The manager samples one set after the other: the second has no completion for longer than the limit."""
    clock = itertools.count(0.0, 20.0)
    monkeypatch.setattr(request_evaluations, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(request_evaluations, "POLL_S", 0.0)
    second = dataclasses.replace(HELD_OUT_SET, name="again")

    async def body():
        asking = evaluations(Answering(ready()), "cluster.request_timeout_s=90")
        await asking.start("step-1", dataclasses.replace(HELD_OUT_SET, samples=4), 3, 1)
        await asking.start("step-1.again", second, 2, 1)
        assert [record["problems"] for record in await asking.finish_all()] == [3, 2]

    run(body)


class Failing(Answering):
    """The manager, and a worker whose episodes all fail."""

    answers = ()


def test_evaluation_that_fails_wholly_is_incomplete():
    """Training goes on."""

    async def body():
        asking = evaluations(Failing(ready()))
        await asking.start("step-1", HELD_OUT_SET, 2, 1)
        [record] = await asking.finish_all()
        assert record["incomplete"] == "2 of 2 failed, the last one: AgentError: stuck"
        assert (record["accuracy"], record["version"]) == (None, -1)

    run(body)


@pytest.mark.parametrize(
    ("eval_id", "name", "ends"), [("before", "eval", True), ("before", "x", False), ("after", "eval", False)]
)
def test_only_held_out_failure_before_training_ends(eval_id, name, ends):
    async def body():
        master: Any = MasterRun.__new__(MasterRun)
        logged: list[str] = []

        async def enter(phase):
            logged.append(phase)

        master._sets = {name: dataclasses.replace(HELD_OUT_SET, name=name)}
        master._records, master._status, master._log = list, SimpleNamespace(enter=enter), logged
        master._parts = SimpleNamespace(evaluations=evaluations(Failing(ready())), rows=None)
        problem = "'before': 2 of 2 failed, the last one: AgentError: stuck"
        with pytest.raises(StuckError, match=problem) if ends else nullcontext():
            await master._evaluate(eval_id, 0)
        assert len(logged) == (1 if ends else 2)

    run(body)


def test_recovery_requests_unfinished_evaluations_once():
    """Due at 1, 2 and 3. The training side dies at 3: the first is done and logged, the second done and not logged, the
    third was never asked for. The one after it dies before any of them has answered.
    """

    async def body():
        manager = Answering(ready(eta=9))
        manager.starts(-1, 1)
        first, log = evaluations(manager), list[dict[str, Any]]()
        for step in (1, 2, 3):
            manager.trains(step)
            if step < 3:
                await first.start(eval_id_of(step), HELD_OUT_SET, 2, step)
            if step == 1:
                log += await first.finish_all()
            while step == 2 and (await manager.evaluation("step-2")).done < 2:
                pass
        await first.start("step-4", HELD_OUT_SET, 2, 4)  # of a step that was undone
        asked = manager.starts(3, 2)
        assert asked == ["step-1", "step-2", "step-4"] and missing(log, asked, 3) == [2, 3]
        second = evaluations(manager)
        for step in missing(log, asked, 3):
            await second.start(eval_id_of(step), HELD_OUT_SET, 2, step, requested_at=3)
        asked = manager.starts(3, 3)
        assert missing(log, asked, 3) == [2, 3], "step 2 is done and in no log, step 3 was forgotten again"
        third = evaluations(manager)
        for step in missing(log, asked, 3):
            await third.start(eval_id_of(step), HELD_OUT_SET, 2, step, requested_at=3)
        log += await third.finish_all()
        assert [(r["eval_id"], r["step"]) for r in log] == [("step-1", 1), ("step-2", 2), ("step-3", 3)]
        assert missing(log, asked, 3) == []

    run(body)


def test_repeated_evaluation_is_logged_with_answering_version():
    async def body():
        manager = Answering(ready(eta=9))
        manager.starts(-1, 1)
        manager.trains(1)
        await evaluations(manager).start("step-1", HELD_OUT_SET, 2, 1)
        for step in (2, 3):
            manager.trains(step)
        asked = manager.starts(3, 2)
        assert missing([], asked, 3) == [1, 3]
        again = evaluations(manager)
        await again.start("step-1", HELD_OUT_SET, 2, 1, requested_at=3)
        [record] = await again.finish_all()
        assert (record["eval_id"], record["step"], record["version_min"]) == ("step-1", 3, 3)

    run(body)


def test_replaced_trainer_starts_no_evaluation():
    async def body():
        manager = Answering(ready())
        manager.starts(-1, 1)
        dead = evaluations(manager)
        manager.starts(0, 2)
        with pytest.raises(Fenced, match="must end"):
            await dead.start("step-1", HELD_OUT_SET, 2, 1)
        assert not manager.state.evaluations.by_id

    run(body)


class Parts:
    """The master's parts that a test of its ends needs; ``log`` is what they were asked, in order."""

    def __init__(self):
        self.log: list[str] = []
        self.stop = asyncio.Event()
        self.master = MasterRun.__new__(MasterRun)
        self.checkpoints = self
        for name, part in {"_stop": self.stop, "_session": self, "_parts": self, "finished": False}.items():
            setattr(self.master, name, part)

    async def run(self, script, done):
        self.log.append("loop")
        return 4

    async def finish(self, *, stopped):
        self.log.append(f"finish stopped={stopped}")


@pytest.mark.parametrize("stopped", [True, False])
def test_stop_during_last_evaluation_saves_checkpoint(monkeypatch, stopped):
    async def body():
        parts = Parts()

        async def start(master):
            return 0

        async def conclude(master, steps):
            if stopped:
                parts.stop.set()
                await asyncio.Event().wait()
            master.finished = True

        monkeypatch.setattr(MasterRun, "_start", start)
        monkeypatch.setattr(MasterRun, "_conclude", conclude)
        await parts.master.run()
        assert parts.log == (["loop", "finish stopped=True"] if stopped else ["loop"])
        assert parts.master.finished is not stopped

    run(body)


def test_ledger_that_contradicts_checkpoint_ends_the_run():
    """The launcher does not start the master again."""

    class Refusing:
        incarnation = f"{1:019d}"

        async def roll_back(self, request):
            raise StreamError("gserver_manager /roll_back: status 400: version 9: the ledger ends at 4")

    async def body():
        master: Any = MasterRun.__new__(MasterRun)
        master._ctx = manager = Refusing()
        master._parts = SimpleNamespace(connections=SimpleNamespace(manager=manager))
        with pytest.raises(StreamError, match="the ledger ends at 4") as refused:
            await master._roll_back(TrainingStart(step=9))
        assert refused.value.permanent and not StreamError.permanent

    run(body)


# ---- The evaluator of `realsys eval`: its phases, the weights that it publishes, and a model that changes under it


INCARNATION = f"{7:019d}"


class Manager:
    """A manager whose evaluations end at once; it keeps what the name store had at each call."""

    def __init__(self, published):
        self.calls: list[tuple[str, bool]] = []
        self.requests: list[EvaluateRequest] = []
        self._published = published

    async def roll_back(self, request):
        assert (request.version, request.incarnation) == (-1, INCARNATION)
        self.calls.append(("roll_back", self._published() is not None))

    async def evaluate(self, request):
        self.calls.append(("evaluate", self._published() is not None))
        self.requests.append(request)

    async def evaluation(self, eval_id):
        counts = {"problems": 2, "ended": True, "tallies": [(1, 1, 1), (1, 0, 1)]}
        return EvaluationReply(2, 2, 0, 0.5, 0.0, 3.0, 0, 0, **counts)

    async def status(self):
        return {"servers": [], "version": 0}


class Trial:
    """The parts of a process in a trial that evaluates a small model."""

    def __init__(self, root):
        self.model = root / "hf"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        self.write_weights(1.0)
        self.paths = TrialPaths(root / "trial")
        self.paths.root.mkdir()
        self.config = changed("evaluation.problems=2", f"model.path={self.model}", "train.loop=evaluate")
        self.names, self.store = trial_names(self.config), MemoryNameStore()
        self.manager = Manager(self.published)
        self.log = StepLog(self.paths.steps)
        context: Any = SimpleNamespace(
            config=self.config,
            paths=self.paths,
            names=self.names,
            store=self.store,
            incarnation=INCARNATION,
            set_state=lambda state: None,
            check_alive=lambda: None,
        )
        self.run = EvaluationRun(context, self.manager, self.log)  # type: ignore[arg-type]

    def write_weights(self, value):
        save_file({"a": torch.full((2,), value)}, self.model / "model.safetensors")

    def published(self):
        found = self.store.get_subtree(self.names.model_version())
        return msgspec.json.decode(next(iter(found.values())), type=PublishedVersion) if found else None


@pytest.fixture
def trial(tmp_path):
    return Trial(tmp_path)


def test_model_is_published_before_its_evaluation(trial):
    asyncio.run(trial.run.run())
    assert trial.manager.calls == [("roll_back", False), ("evaluate", True)]
    published = trial.published()
    assert (published.version, published.incarnation) == (0, INCARNATION)
    verify(Path(published.locator), 0)


def test_results_and_phases_are_in_the_step_log(trial):
    asyncio.run(trial.run.run())
    records = list(read_steps(trial.paths.steps))
    assert [record["phase"] for record in records if record["kind"] == "phase"] == ["load", "evaluate", "done"]
    [result] = [record for record in records if record["kind"] == "eval"]
    assert (result["set"], result["step"], result["accuracy"]) == ("eval", 0, 0.5)


def test_model_that_changes_meanwhile_ends_it(trial):
    asyncio.run(trial.run.run())
    trial.write_weights(2.0)
    status = {"servers": [{"failures": 1, "version": -1}], "version": 0}
    with pytest.raises(WeightsError, match="has changed since the start: .*corrupt"):
        asyncio.run(trial.run.check_weights(status))


# ---- Results of evaluations as the master stores them, with the majority vote


ANSWERS = ("7", r"\frac{1}{2}", "0.5")  # one right answer, and two wrong ones that agree


def write(root, verifier, incomplete="", lost=0):
    """Store an evaluation of one problem with three samples, of which ``lost`` never reached the disk."""
    config = changed(f"data.verifier={verifier}", "evaluation.samples=3", "evaluation.problems=1")
    for number, answer in enumerate(ANSWERS[lost:], lost):
        text = f"\\boxed{{{answer}}}"
        verdict = 5.0, answer == "7", "stop", 3, answer
        append_sample(root / "e", "w", EvalSample("e", "eval", 0, number, 0, 2, 2, "q", text, "7", *verdict))
    state = EvaluationReply(3, 3, 0, 1 / 3, 1.0, 3.0, 2, 2, ended=True, incomplete=incomplete, tallies=[(3, 1, 1)])
    state.accepted = [(0, number, 0) for number in range(3)]
    made = evaluation_sets(config)["eval"]
    result = record("e", 2, made, outcome_of(state), 1.0)
    return ResultWriter(config, root).write("e", made, result, state)


@pytest.mark.processes
@pytest.mark.parametrize(("verifier", "share"), [("math", 0.0), ("exact", 1 / 3)])
def test_votes_agree_as_the_verifier_says(tmp_path, verifier, share):
    result = write(tmp_path, verifier)
    assert result["majority"]["value"] == pytest.approx(share)
    assert read_result(tmp_path / "e") == result and len(read_samples(tmp_path / "e")) == 3


def test_incomplete_evaluation_has_no_vote(tmp_path):
    assert "majority" not in write(tmp_path, "exact", "1 of 3 failed")
    assert read_result(tmp_path / "e")["accuracy"] is None


def test_vote_needs_every_stored_completion(tmp_path):
    result = write(tmp_path, "exact", lost=1)
    assert "majority" not in result and result["accuracy"] == pytest.approx(1 / 3)


def test_vote_over_its_time_limit_is_omitted(tmp_path, monkeypatch, caplog):
    """A comparison of many answers must not delay the end of a run without a bound."""
    monkeypatch.setattr(request_evaluations, "AnswerComparer", functools.partial(AnswerComparer, limit_s=-1.0))
    result = write(tmp_path, "math")
    assert result["majority"] is None and result["accuracy"] == pytest.approx(1 / 3)
    assert "no majority: comparing the final answers took more than" in headline(result)
    assert "has no majority vote" in caplog.text


def test_result_that_cannot_be_stored_is_returned(tmp_path, caplog):
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "samples.jsonl").mkdir()
    result = write(tmp_path, "exact")
    assert result["accuracy"] == pytest.approx(1 / 3) and "cannot be stored" in caplog.text
