"""The loop of a RolloutWorker.

    allocate ──tickets──> one task per ticket: prompt ──> agent (generate, judge) ──> push to a DP head ──> finish
       ^                                                       │ any error                                   │
       └── capacity is free again <──────────── finish: failed, with its reason <──────────────────────────┘

Consumes tickets; waits for free capacity, then for the manager to grant (a held call, no polling); is unblocked by the
end of a rollout, by a grant, or by ``stop``; produces groups on the push-pull stream and one finish per ticket. Holds
no state that a restart would miss: what was running is re-issued by the manager.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from realsys.admission.events import Outcome
from realsys.admission.messages import AllocateReply, AllocateRequest, Answer, FinishReply, FinishRequest
from realsys.cluster.failpoint import reach
from realsys.data.prompts import Prompt
from realsys.errors import RealsysError, RewardError
from realsys.rollout.agent import Agent, Episode
from realsys.rollout.manager_client import RolloutSuperseded
from realsys.types import Ticket, Trajectory, TrajectoryGroup

log = logging.getLogger(__name__)

HOLD_S = 10.0  # how long the manager may hold an allocation
MAX_TICKETS = 4096  # per allocation, the manager's bound
MAX_REASON = 2000  # characters

T = TypeVar("T")


class Manager(Protocol):
    """The part of ManagerClient that is needed here."""

    async def allocate(self, request: AllocateRequest) -> AllocateReply: ...

    async def finish(self, request: FinishRequest) -> FinishReply: ...


class Prompts(Protocol):
    def prompt(self, split: str, index: int) -> Prompt: ...


class Push(Protocol):
    async def push(self, group: TrajectoryGroup) -> None: ...


class RolloutLoop:
    """Keeps up to ``max_groups`` groups of ``group_size`` answers running.

    Capacity is counted in answers, so that problems of an evaluation, with one answer each, run as wide as training.
    """

    def __init__(
        self,
        manager: Manager,
        agent: Agent,
        prompts: Prompts,
        pusher: Push,
        *,
        worker: str,
        max_groups: int,
        group_size: int,
        hold_s: float = HOLD_S,
        incarnation: str = "",
    ) -> None:
        self._manager, self._agent, self._prompts, self._pusher = manager, agent, prompts, pusher
        self._worker, self._incarnation = worker, incarnation
        self._group_size, self._hold_s = group_size, hold_s
        self._free = max_groups * group_size  # answers
        self._tasks: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()
        self._fatal: asyncio.Future[None] | None = None
        self.accepted = self.failed = 0

    @property
    def running(self) -> int:
        """Rollouts under way."""
        return len(self._tasks)

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop``. Raises what must end the process: a manager that stays away, a wrong token."""
        self._fatal = asyncio.get_running_loop().create_future()
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            while not stop.is_set():
                if self._free < self._group_size:
                    self._freed.clear()
                    await self._unless(stopping, self._freed.wait())
                    continue
                reply = await self._unless(stopping, self._allocate())
                for ticket in reply.tickets if reply else ():
                    self._start(ticket)
        finally:
            stopping.cancel()
            await self._cancel_all()

    async def _allocate(self) -> AllocateReply:
        begin = time.monotonic()
        count = min(self._free // self._group_size, MAX_TICKETS)
        request = AllocateRequest(self._worker, count, self._hold_s, incarnation=self._incarnation)
        reply = await self._manager.allocate(request)
        if not reply.tickets and time.monotonic() - begin < min(self._hold_s, reply.retry_after_s):
            # It did not hold the call, because it is stopping: do not run hot.
            await asyncio.sleep(reply.retry_after_s)
        return reply

    async def _unless(self, stopping: asyncio.Task[bool], work: Coroutine[Any, Any, T]) -> T | None:
        """The result of ``work``; None when asked to stop first. Raises what ended a rollout's task."""
        assert self._fatal is not None
        task = asyncio.create_task(work)
        first: set[asyncio.Future[Any]] = {task, stopping, self._fatal}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if self._fatal.done():
                self._fatal.result()
            return task.result() if task.done() else None
        finally:
            if task.cancel():
                await asyncio.wait({task})

    def _start(self, ticket: Ticket) -> None:
        self._free -= ticket.n
        task = asyncio.create_task(self._rollout(ticket), name=f"rollout {ticket.ticket_id}")
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, ticket.n))

    def _ended(self, task: asyncio.Task[None], answers: int) -> None:
        self._tasks.discard(task)
        self._free += answers
        self._freed.set()
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._fatal is not None and not self._fatal.done():
            self._fatal.set_exception(error)

    async def _cancel_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert self._fatal is not None
        if self._fatal.done():
            self._fatal.exception()  # seen, also when another error ends the loop
        else:
            self._fatal.cancel()

    async def _rollout(self, ticket: Ticket) -> None:
        """One ticket from prompt to finish. Raises only what keeps the finish from being reported."""
        try:
            answers = await self._produce(ticket)
        except RolloutSuperseded as error:
            log.info("ticket %s attempt %d: %s", ticket.ticket_id, ticket.attempt, error)
            return
        except RealsysError as error:
            log.warning("ticket %s attempt %d failed: %s", ticket.ticket_id, ticket.attempt, error)
            reason = f"{type(error).__name__}: {error}"
        except Exception as error:  # the request boundary: an agent's defect fails its ticket, with the traceback here
            log.exception("ticket %s attempt %d failed", ticket.ticket_id, ticket.attempt)
            reason = f"{type(error).__name__}: {error}"
        else:
            self.accepted += 1
            reach("rollout.finish")
            await self._finish(ticket, "accepted", "", answers)
            return
        self.failed += 1
        await self._finish(ticket, "failed", reason, [])

    async def _produce(self, ticket: Ticket) -> list[Answer]:
        """Run the episode; a group to train on is with its DP head when this returns."""
        started = time.time()
        reach("rollout.running")
        episode = await self._agent.run(ticket, self._prompts.prompt(ticket.split, ticket.prompt_index))
        if len(episode.trajectories) != ticket.n or len(episode.correct) != ticket.n:
            raise RuntimeError(
                f"the agent returned {len(episode.trajectories)} answers, the ticket asks for {ticket.n}"
            )
        check_rewards(ticket, episode.trajectories)
        if ticket.kind == "train":
            group = TrajectoryGroup(
                ticket, episode.trajectories, self._worker, started=started, finished=time.time(), extra=episode.extra
            )
            reach("rollout.push")
            await self._pusher.push(group)
        return answers_of(ticket, episode)

    async def _finish(self, ticket: Ticket, outcome: Outcome, reason: str, answers: list[Answer]) -> None:
        request = FinishRequest(ticket.ticket_id, ticket.attempt, self._worker, outcome, reason[:MAX_REASON], answers)
        reply = await self._manager.finish(request)
        if not reply.known:
            log.info("ticket %s attempt %d: superseded before it finished", ticket.ticket_id, ticket.attempt)


def check_rewards(ticket: Ticket, trajectories: Sequence[Trajectory]) -> None:
    """Raises RewardError for a reward that is no number: it would spoil every other of its batch."""
    for k, trajectory in enumerate(trajectories):
        if not math.isfinite(trajectory.reward):
            raise RewardError(f"ticket {ticket.ticket_id}: answer {k} has the reward {trajectory.reward}, not a number")


def answers_of(ticket: Ticket, episode: Episode) -> list[Answer]:
    """What the manager is told of each answer."""
    return [_answer(ticket, t, correct) for t, correct in zip(episode.trajectories, episode.correct, strict=True)]


def _answer(ticket: Ticket, trajectory: Trajectory, correct: bool) -> Answer:
    versions = trajectory.versions
    return Answer(
        reward=trajectory.reward,
        correct=correct,
        length=trajectory.answer_len,
        finish_reason=trajectory.finish_reason,
        version_min=int(versions.min()) if len(versions) else ticket.version,
        version_max=int(versions.max()) if len(versions) else ticket.version,
    )
