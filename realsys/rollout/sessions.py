"""Concurrent episodes of a ticket, and the view of the engine that each of them has.

    ticket ──> n episodes ──> agent.run(task, session) ──generate──> Calls ──> PartialRolloutManager
                   │                                      └─ first calls for the same tokens: one request
                   └─ Episode, or an error of this episode ──> Played: enough episodes for a group, or the first error

An episode without a verdict leaves the loss (`error-is-not-data`). It counts as played: the group is trained with the
others, and nothing is generated again.

Seeds depend only on (ticket seed, episode, number of the call), never on timing: the first call of episode k has
seed + k, and every later one a seed mixed from all three. A merged first call has the seed of its first episode.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from realsys.config.evaluation_sets import evaluation_sets
from realsys.config.schema import Config, SamplingConfig
from realsys.data.prompts import Prompt
from realsys.errors import AgentError, RealsysError, RewardError, StuckError
from realsys.generation.client import Generated, SamplingSpec
from realsys.manager.ledger.order import sampling_seed
from realsys.rollout.agents.base import Agent
from realsys.rollout.defects import Defects, explain, one_line
from realsys.rollout.episodes import check_episode
from realsys.rollout.manager_client import RolloutSuperseded
from realsys.rollout.partial import Call, Deliver
from realsys.rollout.task import Task
from realsys.types import Episode, Ticket

log = logging.getLogger(__name__)

T = TypeVar("T")


class Engine(Protocol):
    """The part of PartialRolloutManager that this module needs."""

    async def generate(self, call: Call, deliver: Deliver = ...) -> list[Generated]: ...

    def discard(self, ticket: Ticket) -> None: ...


@dataclass(slots=True)
class Played:
    """The episodes of a ticket that succeeded, in order, and one line for each that failed."""

    episodes: list[Episode]
    errors: list[str] = field(default_factory=list)
    extra: dict[str, float] = field(default_factory=dict)  # seconds, for the group's record


@dataclass(frozen=True, slots=True)
class GroupRules:
    """Conditions for a group.

    min_episodes   episodes that must succeed or have no verdict; 0: all of them
    least          episodes with a verdict: 2 if advantages compare them with each other
    needs_correct  ``train.ppo.filter`` uses the success rate, so each episode must be right or wrong
    """

    min_episodes: int = 0
    least: int = 1
    needs_correct: bool = False


@dataclass(frozen=True, slots=True)
class _First:
    """The first call of an episode, which waits for its siblings."""

    episode: int
    token_ids: tuple[int, ...]
    completion: asyncio.Future[Generated]


class Calls:
    """All calls of one attempt of a ticket; ``close`` ends those that still run."""

    def __init__(self, engine: Engine, ticket: Ticket, spec: SamplingSpec) -> None:
        self._engine = engine
        self._ticket = ticket
        self._spec = spec
        self._waiting: list[_First] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.superseded: RolloutSuperseded | None = None

    async def generate(
        self, episode: int, number: int, token_ids: Sequence[int], previous: tuple[str, int] | None
    ) -> Generated:
        """Sample one completion for call ``number`` of ``episode``; raise the errors of the engine."""
        if self._closed:
            raise AgentError("generate() was called after the end of the episode: run() must wait for all its calls")
        try:
            if number == 0:
                return await self._first(episode, token_ids)
            seed = sampling_seed(self._ticket.seed, episode, number)
            call = Call(self._ticket, f"{episode}.{number}", [int(t) for t in token_ids], self._spec, seed, previous)
            # A separate task, so that close() can cancel it if the agent does not wait for it.
            return (await self._start(self._engine.generate(call)))[0]
        except RolloutSuperseded as error:
            self.superseded = error  # the agent may catch it, but the attempt is over all the same
            raise

    async def close(self) -> None:
        """Cancel the calls that run or wait to be sent, and wait for their end."""
        self._closed = True
        for first in self._waiting:
            first.completion.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._engine.discard(self._ticket)

    async def _first(self, episode: int, token_ids: Sequence[int]) -> Generated:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            # call_soon runs after all tasks that are ready now, so siblings that call in this turn of the
            # event loop join the request.
            loop.call_soon(self._send_first)
        first = _First(episode, tuple(token_ids), loop.create_future())
        self._waiting.append(first)
        return await first.completion

    def _send_first(self) -> None:
        waiting, self._waiting = self._waiting, []
        for run in _runs([first for first in waiting if not first.completion.done()]):
            task = self._start(self._send(run))
            for first in run:
                first.completion.add_done_callback(partial(_cancel_unwanted, run, task))

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send(self, run: list[_First]) -> None:
        """Send one request for all of ``run``. Each gets its completion; if it fails, the others get the error."""

        def deliver(number: int, completion: Generated) -> None:
            if not run[number].completion.done():
                run[number].completion.set_result(completion)

        episode, token_ids = run[0].episode, list(run[0].token_ids)
        spec = replace(self._spec, n=len(run)) if len(run) > 1 else self._spec
        call = Call(self._ticket, f"{episode}.0", token_ids, spec, self._ticket.seed + episode)
        try:
            await self._engine.generate(call, deliver)
        except Exception as error:  # passed on to the agents that wait for it
            for first in run:
                if not first.completion.done():
                    first.completion.set_exception(error)
        finally:
            for first in run:
                first.completion.cancel()  # no effect if it is done


def _runs(waiting: Sequence[_First]) -> list[list[_First]]:
    """Join neighbouring episodes with the same tokens: completion k of a request has the seed of the k-th one."""
    runs: list[list[_First]] = []
    latest: dict[tuple[int, ...], list[_First]] = {}
    for first in sorted(waiting, key=lambda first: first.episode):
        run = latest.get(first.token_ids)
        if run is None or run[-1].episode + 1 != first.episode:
            run = latest[first.token_ids] = []
            runs.append(run)
        run.append(first)
    return runs


def _cancel_unwanted(run: Sequence[_First], task: asyncio.Task[Any], _: asyncio.Future[Generated]) -> None:
    if all(first.completion.cancelled() for first in run):
        task.cancel()


class EpisodeSession:
    """View of the engine for one episode (``agents.base.Session``)."""

    def __init__(self, calls: Calls, episode: int) -> None:
        self._calls = calls
        self._episode = episode
        self._number = 0  # number of the next call
        self._previous: tuple[str, int] | None = None
        self.sampled = 0  # tokens that the engine returned
        self.seconds = 0.0  # sum over its calls

    async def generate(self, token_ids: Sequence[int]) -> Generated:
        """Sample one completion after ``token_ids``."""
        number, begin = self._number, time.perf_counter()
        self._number += 1
        completion = await self._calls.generate(self._episode, number, token_ids, self._previous)
        self.seconds += time.perf_counter() - begin
        self.sampled += len(completion.tokens)
        if completion.route:
            self._previous = (completion.route[-1][0], int(completion.versions[-1]))
        return completion


class _Hopeless(Exception):
    """Too many episodes have failed for the group: the others are cancelled."""


class GroupPlayer:
    """Player of all episodes of a ticket; one object per RolloutWorker."""

    def __init__(
        self,
        agent: Agent,
        engine: Engine,
        spec: SamplingSpec,
        longest_row: int,
        group: GroupRules | None = None,
        eval_specs: Mapping[str, SamplingSpec] | None = None,
    ) -> None:
        """``longest_row`` is the longest row that training accepts, in tokens.

        ``eval_specs``: name of an evaluation's data set -> its sampling settings, if they are not ``spec``.
        """
        self._agent = agent
        self._engine = engine
        self._spec = spec
        self._eval_specs = eval_specs or {}
        self._longest_row = longest_row
        self._rules = group or GroupRules()
        self._defects = Defects()
        self._lost_tokens = 0

    def take_lost_tokens(self) -> int:
        """Return the tokens sampled for training episodes that failed, since the last call."""
        lost, self._lost_tokens = self._lost_tokens, 0
        return lost

    async def play(self, ticket: Ticket, prompt: Prompt) -> Played:
        """Play ``ticket.n`` episodes at the same time.

        Raises RolloutSuperseded if the attempt is over, StuckError if the agent has the same defect in every
        episode of two tickets in a row, and the first error if too few episodes succeeded: a RewardError only if no
        other is the cause.
        """
        calls = Calls(self._engine, ticket, self._eval_specs.get(ticket.set, self._spec))
        sessions = [EpisodeSession(calls, episode) for episode in range(ticket.n)]
        needed = min(self._rules.min_episodes or ticket.n, ticket.n)
        group = _Playing(ticket, needed, min(self._rules.least, ticket.n))
        sent = False
        try:
            played = await self._play_all(group, calls, sessions, prompt)
            sent = True
            return played
        finally:
            if ticket.kind == "train":
                failed = [s.sampled for k, s in enumerate(sessions) if not sent or k not in group.episodes]
                self._lost_tokens += sum(failed)

    async def _play_all(
        self, group: _Playing, calls: Calls, sessions: Sequence[EpisodeSession], prompt: Prompt
    ) -> Played:
        begin, ticket = time.perf_counter(), group.ticket
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, session in enumerate(sessions):
                    tasks.create_task(self._play_one(group, Task(prompt, ticket, number), session))
        except ExceptionGroup as errors:
            for error in errors.exceptions:
                if not isinstance(error, _Hopeless):
                    raise error from None
        finally:
            await calls.close()
        if calls.superseded is not None:
            raise calls.superseded
        if problem := self._defects.repeated(ticket.n, list(group.failed.values())):
            raise StuckError(problem)
        if group.hopeless:
            raise group.first_error()
        seconds = max(session.seconds for session in sessions)
        extra = {"generate_s": seconds, "reward_s": max(0.0, time.perf_counter() - begin - seconds)}
        return Played([group.episodes[k] for k in sorted(group.episodes)], group.errors(), extra)

    async def _play_one(self, group: _Playing, task: Task, session: EpisodeSession) -> None:
        """Play one episode and add its result to ``group``. Raises only errors that end the whole attempt."""
        try:
            episode = await self._agent.run(task, session)
            check_episode(episode, self._longest_row, session.sampled)
            if self._rules.needs_correct and task.ticket.kind == "train" and episode.correct is None:
                raise AgentError("correct is None, but train.ppo.filter needs it: return it, or set min=0 and max=1")
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            error: RealsysError = AgentError("run was cancelled by its own code")
        except (Exception, SystemExit) as raised:  # the request boundary: the user's code may raise anything
            error = explain(raised)
            if isinstance(error, RolloutSuperseded):
                raise error from None
            if isinstance(error, AgentError) and self._defects.is_new(error):
                log.error("ticket %s episode %d: %s", task.ticket.ticket_id, task.episode, error, exc_info=raised)
        else:
            group.episodes[task.episode] = episode
            return
        group.failed[task.episode] = error
        # A defect of the agent cancels no other episode: only if every episode has it, it is no accident.
        if group.hopeless and not isinstance(error, AgentError):
            raise _Hopeless


@dataclass(slots=True)
class _Playing:
    """Results of a ticket's episodes so far. ``failed`` is in the order in which they failed.

    A group needs ``needed`` episodes that were played, with or without a verdict, and ``least`` with one.
    """

    ticket: Ticket
    needed: int
    least: int
    episodes: dict[int, Episode] = field(default_factory=dict)
    failed: dict[int, RealsysError] = field(default_factory=dict)

    @property
    def hopeless(self) -> bool:
        """True if too few episodes are left for a group."""
        broken = sum(not isinstance(error, RewardError) for error in self.failed.values())
        return broken > self.ticket.n - self.needed or len(self.failed) > self.ticket.n - self.least

    def first_error(self) -> RealsysError:
        """Return the first error that is not a missing verdict, else the first error."""
        return min(self.failed.values(), key=lambda error: isinstance(error, RewardError))

    def errors(self) -> list[str]:
        """Return one line for each episode that failed."""
        return [one_line(f"episode {k}: {type(error).__name__}: {error}") for k, error in sorted(self.failed.items())]


def group_player(config: Config, agent: Agent, engine: Engine, end_of_text: Sequence[int]) -> GroupPlayer:
    """Return the player of a trial. ``end_of_text``: the tokenizer's own stop tokens."""
    return GroupPlayer(
        agent,
        engine,
        sampling_spec(config.generation.sampling, end_of_text),
        config.train.microbatch_tokens,
        group_rules(config),
        {name: sampling_spec(made.sampling, end_of_text) for name, made in evaluation_sets(config).items()},
    )


def group_rules(config: Config) -> GroupRules:
    """Return the conditions for a group from the trial's settings."""
    success, advantage = config.train.ppo.filter, config.train.ppo.advantage
    least = 2 if "group" in (advantage.mean, advantage.std) else 1
    return GroupRules(config.rollout.min_episodes, least, needs_correct=success.min > 0 or success.max < 1)


def sampling_spec(config: SamplingConfig, end_of_text: Sequence[int]) -> SamplingSpec:
    """Return the trial's sampling settings, with the tokenizer's own stop tokens; ``n`` is set per call."""
    stops = tuple(dict.fromkeys((*end_of_text, *config.stop_token_ids)))
    settings = {**config.model_dump(), "top_k": config.top_k or -1, "stop": tuple(config.stop), "stop_token_ids": stops}
    return SamplingSpec(**settings)
