"""Evaluations as the master asks for them, against the manager's real state; and how it ends when it is stopped."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from realsys.config.evaluation_sets import EvaluationSet, evaluation_sets
from realsys.errors import Fenced, StreamError, StuckError, WaitTimeout
from realsys.manager.decisions import ManagerState
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
from realsys.train.master import request_evaluations
from realsys.train.master.recovery import TrainingStart, eval_id_of, unanswered
from realsys.train.master.request_evaluations import EvaluationRequests
from realsys.train.master.run import MasterRun
from realsys.types import PublishedVersion
from tests.support.ledger.manager_states import ANSWER, ready, update, version
from tests.support.processes.config_trees import changed

BOUND_S = 60.0


class Answering:
    """The manager, and a worker that answers one problem between two questions how far it is."""

    answers: tuple[Answer, ...] = (ANSWER,)

    def __init__(self, state: ManagerState) -> None:
        self.state, self.asked, self.looks = state, list[str](), list[int]()
        self._requests = map(str, itertools.count())

    async def evaluate(self, request: EvaluateRequest) -> None:
        self.asked.append(request.eval_id)
        try:
            self.state.evaluate(request, 0.0)
        except OlderTrainer as refusal:
            raise Fenced(str(refusal)) from refusal

    async def evaluation(self, eval_id: str) -> EvaluationReply:
        request = AllocateRequest("w", 1, request_id=next(self._requests))
        for ticket in self.state.allocate(request, 0.0).tickets:
            at = ticket.version
            answers = [msgspec.structs.replace(answer, version_min=at, version_max=at) for answer in self.answers]
            outcome: Outcome = "accepted" if answers else "failed"
            reason = "" if answers else "AgentError: stuck"
            self.state.finish(FinishRequest(ticket.ticket_id, ticket.attempt, "w", outcome, reason, answers), 0.0)
        return self.state.evaluations.find(eval_id).reply()

    async def status(self) -> dict[str, Any]:
        return status(self.state, 0.0, 0.0)

    async def repair(self, status: Mapping[str, Any]) -> None:
        self.looks.append(status["version"])

    def starts(self, step: int, number: int) -> list[str]:
        """A training side goes back to ``step`` and publishes; the evaluations that were ever asked for."""
        reply = self.state.roll_back(RollBackRequest(step, step, f"{number:019d}"), 0.0)
        assert isinstance(reply, RollBackReply)
        self.publishes(step)
        return reply.evaluations

    def publishes(self, step: int) -> None:
        self.state.servers.publish(PublishedVersion(step, self.state.trainer_incarnation, f"/v{step}", step))
        if isinstance(self.state.next_order("generation_server/0", "1", 0.0), UpdateOrder):  # else it is held
            update(self.state, 0)

    def trains(self, step: int) -> None:
        """One ticket becomes version ``step``."""
        ticket = self.state.ledger.grant("w", "", self.state.version, 0.0)  # not the problem of an evaluation
        assert ticket is not None
        self.state.claim(ClaimRequest(step, [ticket.ticket_id], self.state.trainer_incarnation), 0.0)
        told = TrainedRequest(step, step, [ticket.ticket_id], incarnation=self.state.trainer_incarnation)
        assert isinstance(self.state.trained(told, 0.0), TrainedReply)
        self.publishes(step)


class NoWriter:
    """Stores nothing."""

    def write(
        self, eval_id: str, made: EvaluationSet, result: dict[str, Any], state: EvaluationReply
    ) -> dict[str, Any]:
        return result


SETS = evaluation_sets(changed("evaluation.problems=2", "evaluation.every_steps=1"))
HELD_OUT_SET = SETS["eval"]


def evaluations(manager: Answering, *settings: str) -> EvaluationRequests:
    parts: Any = {"config": changed(*settings), "repair": manager.repair, "writer": NoWriter()}
    return EvaluationRequests(manager, trainer_incarnation=manager.state.trainer_incarnation, **parts)  # type: ignore[arg-type]


def missing(log: list[dict[str, Any]], asked: list[str], done: int) -> list[int]:
    """Return the steps whose evaluation has no result."""
    return [step for _, step in unanswered(log, asked, done, SETS, 100)]


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * BOUND_S):
            await body()

    asyncio.run(bounded())


def test_extended_run_is_evaluated_at_its_new_end() -> None:
    async def body() -> None:
        manager = Answering(ready())
        [first] = await evaluations(manager).run("after", SETS, 0)
        manager.state.servers.publish(version(1))
        made: Any = manager.state.next_order("generation_server/0", "1", 0.0)
        assert manager.state.begin_update(made, 0.0) and manager.state.servers.succeeded(made, 0.1, {})
        [second] = await evaluations(manager).run("after", SETS, 1)
        assert [(r["eval_id"], r["step"], r["problems"]) for r in (first, second)] == [("after", 0, 2), ("after", 1, 2)]
        assert len(set(manager.asked)) == 2, "the manager answers the same id with what it has"

    run(body)


def test_master_waits_for_evaluations_at_end() -> None:
    async def body() -> None:
        asking = evaluations(Answering(ready()))
        await asking.start("step-1", HELD_OUT_SET, 2, 1)
        await asking.start("step-2", HELD_OUT_SET, 3, 2)
        records = await asking.finish_all()
        assert sorted((r["eval_id"], r["problems"]) for r in records) == [("step-1", 2), ("step-2", 3)]
        assert await asking.finish_all() == []

    run(body)


def test_evaluation_wait_checks_newest_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be one that no server can load, and at the end of a run none comes after it."""
    monkeypatch.setattr(request_evaluations, "POLL_S", 0.0)
    monkeypatch.setattr(request_evaluations, "STATUS_INTERVAL_S", -1.0)

    async def body() -> None:
        manager = Answering(ready())
        await evaluations(manager).run("after", SETS, 0)
        assert manager.looks and set(manager.looks) == {0}

    run(body)


def test_standstill_of_an_evaluation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_evaluations, "POLL_S", 0.0)

    async def body() -> None:
        manager = Answering(ready(servers=0))
        asking = evaluations(manager, "cluster.request_timeout_s=0.01")
        with pytest.raises(WaitTimeout, match=r"'after-0' has 0 of 2 completions, and no new one for 0.01 s"):
            await asking.run("after", SETS, 0)

    run(body)


def test_long_evaluation_with_progress_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit counts from the last completion, however many there are."""
    clock = itertools.count(0.0, 20.0)
    monkeypatch.setattr(request_evaluations, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(request_evaluations, "POLL_S", 0.0)

    async def body() -> None:
        asking = evaluations(Answering(ready()), "cluster.request_timeout_s=90")
        await asking.start("step-1", HELD_OUT_SET, 3, 1)
        [record] = await asking.finish_all()
        assert record["problems"] == 3 and record["seconds"] > 90

    run(body)


def test_set_that_waits_its_turn_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager samples one set after the other: the second has no completion for longer than the limit."""
    clock = itertools.count(0.0, 20.0)
    monkeypatch.setattr(request_evaluations, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(request_evaluations, "POLL_S", 0.0)
    second = dataclasses.replace(HELD_OUT_SET, name="again")

    async def body() -> None:
        asking = evaluations(Answering(ready()), "cluster.request_timeout_s=90")
        await asking.start("step-1", dataclasses.replace(HELD_OUT_SET, samples=4), 3, 1)
        await asking.start("step-1.again", second, 2, 1)
        assert [record["problems"] for record in await asking.finish_all()] == [3, 2]

    run(body)


class Failing(Answering):
    """The manager, and a worker whose episodes all fail."""

    answers = ()


def test_evaluation_that_fails_wholly_is_incomplete() -> None:
    """Training goes on."""

    async def body() -> None:
        asking = evaluations(Failing(ready()))
        await asking.start("step-1", HELD_OUT_SET, 2, 1)
        [record] = await asking.finish_all()
        assert record["incomplete"] == "2 of 2 failed, the last one: AgentError: stuck"
        assert (record["accuracy"], record["version"]) == (None, -1)

    run(body)


@pytest.mark.parametrize(
    ("eval_id", "name", "ends"), [("before", "eval", True), ("before", "x", False), ("after", "eval", False)]
)
def test_only_held_out_failure_before_training_ends(eval_id: str, name: str, ends: bool) -> None:
    async def body() -> None:
        master: Any = MasterRun.__new__(MasterRun)
        logged: list[str] = []

        async def enter(phase: str) -> None:
            logged.append(phase)

        master._sets = {name: dataclasses.replace(HELD_OUT_SET, name=name)}
        master._records, master._status, master._log = list, SimpleNamespace(enter=enter), logged
        master._parts = SimpleNamespace(evaluations=evaluations(Failing(ready())))
        problem = "'before': 2 of 2 failed, the last one: AgentError: stuck"
        with pytest.raises(StuckError, match=problem) if ends else nullcontext():
            await master._evaluate(eval_id, 0)
        assert len(logged) == (1 if ends else 2)

    run(body)


def test_recovery_requests_unfinished_evaluations_once() -> None:
    """Due at 1, 2 and 3. The training side dies at 3: the first is done and logged, the second done and not logged, the
    third was never asked for. The one after it dies before any of them has answered.
    """

    async def body() -> None:
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


def test_repeated_evaluation_is_logged_with_answering_version() -> None:
    async def body() -> None:
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


def test_replaced_trainer_starts_no_evaluation() -> None:
    async def body() -> None:
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

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stop = asyncio.Event()
        self.master = MasterRun.__new__(MasterRun)
        self.checkpoints = self
        for name, part in {"_stop": self.stop, "_loop": self, "_parts": self, "finished": False}.items():
            setattr(self.master, name, part)

    async def run(self, done: int) -> int:
        self.log.append("loop")
        return 4

    async def finish(self, *, stopped: bool) -> None:
        self.log.append(f"finish stopped={stopped}")


@pytest.mark.parametrize("stopped", [True, False])
def test_stop_during_last_evaluation_saves_checkpoint(monkeypatch: pytest.MonkeyPatch, stopped: bool) -> None:
    async def body() -> None:
        parts = Parts()

        async def start(master: MasterRun) -> int:
            return 0

        async def conclude(master: MasterRun, steps: int) -> None:
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


def test_ledger_that_contradicts_checkpoint_ends_the_run() -> None:
    """The launcher does not start the master again."""

    class Refusing:
        incarnation = f"{1:019d}"

        async def roll_back(self, request: object) -> None:
            raise StreamError("gserver_manager /roll_back: status 400: version 9: the ledger ends at 4")

    async def body() -> None:
        master: Any = MasterRun.__new__(MasterRun)
        master._ctx = manager = Refusing()
        master._parts = SimpleNamespace(connections=SimpleNamespace(manager=manager))
        with pytest.raises(StreamError, match="the ledger ends at 4") as refused:
            await master._roll_back(TrainingStart(step=9))
        assert refused.value.permanent and not StreamError.permanent

    run(body)
