"""Evaluations as the master asks for them, against the manager's real state; and how it ends when it is stopped."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from realsys.admission.manager import ManagerState
from realsys.admission.messages import AllocateRequest, EvaluateRequest, EvaluationReply, FinishRequest
from realsys.errors import StreamError
from realsys.master.evaluation import Evaluations
from realsys.master.recovery import Start
from tests.manager_states import ANSWER, ready, version
from workers.master_worker import Master

BOUND_S = 15.0


class Answering:
    """The manager, and a worker that answers one problem between two questions how far it is."""

    def __init__(self, state: ManagerState) -> None:
        self.state, self.asked = state, list[str]()
        self._requests = map(str, itertools.count())

    async def evaluate(self, request: EvaluateRequest) -> None:
        self.asked.append(request.eval_id)
        self.state.evaluate(request, 0.0)

    async def evaluation(self, eval_id: str) -> EvaluationReply:
        request = AllocateRequest("w", 1, request_id=next(self._requests))
        for ticket in self.state.allocate(request, 0.0).tickets:
            self.state.finish(FinishRequest(ticket.ticket_id, ticket.attempt, "w", "accepted", "", [ANSWER]), 0.0)
        found = self.state.evaluations.get(eval_id)
        assert found is not None
        return found.reply()


def evaluations(manager: Answering) -> Evaluations:
    return Evaluations(manager, seed=1, timeout_s=BOUND_S)  # type: ignore[arg-type]


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * BOUND_S):
            await body()

    asyncio.run(bounded())


def test_a_run_that_trains_on_is_evaluated_again_at_its_new_end() -> None:
    async def body() -> None:
        manager = Answering(ready())
        first = await evaluations(manager).run("after", 2, 0)
        manager.state.publish(version(1))
        made: Any = manager.state.servers.next_order("generation_server/0", "1", 0.0)
        assert manager.state.begin_update(made, 0.0) and manager.state.servers.succeeded(made, 0.1, {})
        second = await evaluations(manager).run("after", 2, 1)
        assert [(r["eval_id"], r["step"], r["problems"]) for r in (first, second)] == [("after", 0, 2), ("after", 1, 2)]
        assert len(set(manager.asked)) == 2, "the manager answers the same id with what it has"

    run(body)


def test_what_was_started_beside_training_is_waited_for_at_its_end() -> None:
    async def body() -> None:
        asking = evaluations(Answering(ready()))
        await asking.start("step-1", 2, 1)
        await asking.start("step-2", 3, 2)
        records = await asking.rest()
        assert sorted((r["eval_id"], r["problems"]) for r in records) == [("step-1", 2), ("step-2", 3)]
        assert await asking.rest() == []

    run(body)


class Parts:
    """The master's parts that a test of its ends needs; ``log`` is what they were asked, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stop = asyncio.Event()
        self.master = Master.__new__(Master)
        for name, part in {"_stop": self.stop, "_loop": self, "_checkpoints": self, "finished": False}.items():
            setattr(self.master, name, part)

    async def run(self, done: int) -> int:
        self.log.append("loop")
        return 4

    async def finish(self, *, stopped: bool) -> None:
        self.log.append(f"finish stopped={stopped}")


@pytest.mark.parametrize("stopped", [True, False])
def test_stopped_in_its_last_evaluation_a_run_saves_what_it_has_trained(
    monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    async def body() -> None:
        parts = Parts()

        async def start(master: Master) -> int:
            return 0

        async def conclude(master: Master, steps: int) -> None:
            if stopped:
                parts.stop.set()
                await asyncio.Event().wait()
            master.finished = True

        monkeypatch.setattr(Master, "_start", start)
        monkeypatch.setattr(Master, "_conclude", conclude)
        await parts.master.run()
        assert parts.log == (["loop", "finish stopped=True"] if stopped else ["loop"])
        assert parts.master.finished is not stopped

    run(body)


def test_a_ledger_that_does_not_fit_the_checkpoint_ends_the_run_and_not_only_this_start() -> None:
    class Refusing:
        incarnation = f"{1:019d}"

        async def roll_back(self, request: object) -> None:
            raise StreamError("gserver_manager /roll_back: status 400: version 9: the ledger ends at 4")

    async def body() -> None:
        master = Master.__new__(Master)
        for name in ("_manager", "_ctx"):
            setattr(master, name, Refusing())
        with pytest.raises(StreamError, match="the ledger ends at 4") as refused:
            await master._roll_back(Start(step=9))
        assert refused.value.permanent and not StreamError.permanent

    run(body)
