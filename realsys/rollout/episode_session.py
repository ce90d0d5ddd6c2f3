"""Calls of the engine by the episodes of one attempt, and the view of the engine that each episode has.

    agent.run ──generate──────────────> EpisodeSession ──> Calls ──> ResumableEngine
        └─base_url──> Gateway ──Capture─────^                 └─ equal first calls: one request

Seeds depend only on (ticket seed, episode, number of the call), never on timing: the first call of episode k has
seed + k, and every later one a seed mixed from all three. A merged first call has the seed of its first episode.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from realsys.errors import AgentError
from realsys.generation.client import SamplingSpec
from realsys.generation.completion import Completion
from realsys.manager.client import RolloutSuperseded
from realsys.observe.spans import span
from realsys.rollout.gateway.capture import Capture
from realsys.rollout.gateway.gateway import Gateway
from realsys.rollout.resumable_engine import Deliver, EngineCall
from realsys.types import Ticket, sampling_seed

T = TypeVar("T")
#: Receives tokens of a completion as they are sampled.
Tokens = Callable[[Sequence[int]], None]


class CompletionEngine(Protocol):
    """The part of ResumableEngine that this module needs."""

    async def generate(self, call: EngineCall, deliver: Deliver = ...) -> list[Completion]: ...

    def discard(self, ticket: Ticket) -> None: ...


@dataclass(frozen=True, slots=True)
class _First:
    """The first call of an episode, which waits for its siblings."""

    episode: int
    token_ids: tuple[int, ...]
    spec: SamplingSpec
    completion: asyncio.Future[Completion]
    on_tokens: Tokens | None
    policy: tuple[str, bool]


class Calls:
    """All calls of one attempt of a ticket; ``close`` ends those that still run."""

    def __init__(self, engine: CompletionEngine, ticket: Ticket, spec: SamplingSpec) -> None:
        self._engine = engine
        self._ticket = ticket
        self.spec = spec
        self._waiting: list[_First] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.superseded: RolloutSuperseded | None = None
        self.cut_tokens: Counter[int] = Counter()  # episode -> tokens of its calls that were cancelled

    async def generate(
        self,
        episode: int,
        number: int,
        token_ids: Sequence[int],
        spec: SamplingSpec,
        previous: tuple[str, int] | None,
        on_tokens: Tokens | None = None,
        policy: tuple[str, bool] = ("", False),
    ) -> Completion:
        """Sample one completion for call ``number`` of ``episode``; raise the errors of the engine.

        ``policy``: name, and whether it may be no pin (``EngineCall``).
        """
        if self._closed:
            raise AgentError("generate() was called after the end of the episode: run() must wait for all its calls")
        try:
            if number == 0:
                loop = asyncio.get_running_loop()
                if not self._waiting:
                    # call_soon runs after all tasks that are ready now, so siblings that call in this turn of the
                    # event loop join the request.
                    loop.call_soon(self._send_first)
                first = _First(episode, tuple(token_ids), spec, loop.create_future(), on_tokens, policy)
                self._waiting.append(first)
                return await first.completion
            seed = sampling_seed(self._ticket.seed, episode, number)
            tokens = [int(t) for t in token_ids]
            call = EngineCall(self._ticket, f"{episode}.{number}", tokens, spec, seed, previous, None, *policy)
            if on_tokens is not None:
                call = dataclasses.replace(call, on_tokens=lambda _, tokens: on_tokens(tokens))
            # A separate task, so that close() can cancel it if the agent does not wait for it.
            return (await self._start(self._engine.generate(call, partial(self._cut, episode))))[0]
        except RolloutSuperseded as error:
            self.superseded = error  # the agent may catch it, but the attempt is over all the same
            raise

    def unit_of(self, episode: int) -> str:
        """Return the name of an episode in the spans of all processes."""
        return f"{self._ticket.unit}/{episode}"

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

    def _cut(self, episode: int, _: int, completion: Completion) -> None:
        """Count the tokens of a call that was cancelled."""
        if completion.finish_reason == "abort":
            self.cut_tokens[episode] += len(completion.tokens)

    async def _send(self, run: list[_First]) -> None:
        """Send one request for all of ``run``. Each gets its completion; if it fails, the others get the error."""

        def deliver(number: int, completion: Completion) -> None:
            if run[number].completion.done():
                self.cut_tokens[run[number].episode] += len(completion.tokens)
            else:
                run[number].completion.set_result(completion)

        def tell(number: int, tokens: Sequence[int]) -> None:
            if (on_tokens := run[number].on_tokens) is not None and not run[number].completion.done():
                on_tokens(tokens)

        episode, token_ids = run[0].episode, list(run[0].token_ids)
        spec = replace(run[0].spec, n=len(run)) if len(run) > 1 else run[0].spec
        seed = self._ticket.seed + episode
        call = EngineCall(self._ticket, f"{episode}.0", token_ids, spec, seed, None, None, *run[0].policy)
        if any(first.on_tokens is not None for first in run):
            call = dataclasses.replace(call, on_tokens=tell)
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
    """Join neighbouring episodes with the same tokens and settings: completion k of a request has the seed of the
    k-th one.
    """
    runs: list[list[_First]] = []
    latest: dict[tuple[object, ...], list[_First]] = {}
    for first in sorted(waiting, key=lambda first: first.episode):
        run = latest.get(key := (first.token_ids, first.spec, first.policy))
        if run is None or run[-1].episode + 1 != first.episode:
            run = latest[key] = []
            runs.append(run)
        run.append(first)
    return runs


def _cancel_unwanted(run: Sequence[_First], task: asyncio.Task[Any], _: asyncio.Future[Completion]) -> None:
    if all(first.completion.cancelled() for first in run):
        task.cancel()


def _temperature(spec: SamplingSpec) -> float:
    """Return the temperature of the distribution that a request samples from; 0: it takes the most probable token."""
    return 0.0 if spec.top_k == 1 else spec.temperature


class EpisodeSession:
    """View of the engine for one episode (``agents.contract.Session``)."""

    def __init__(self, calls: Calls, episode: int, gateway: Gateway | None = None) -> None:
        self._calls = calls
        self.episode = episode
        self._gateway = gateway
        self._capture: Capture | None = None
        self._number = 0  # number of the next call
        self._previous: dict[str, tuple[str, int]] = {}  # policy -> server and version of its last call
        self.sampled = 0  # tokens that the engine returned
        self.last: tuple[Sequence[int], Completion] | None = None  # the last call that returned: its prompt, its result
        self.seconds = 0.0  # sum over its calls

    @property
    def spec(self) -> SamplingSpec:
        """The sampling settings of the trial, or of the evaluation's data set."""
        return self._calls.spec

    @property
    def base_url(self) -> str:
        """Address of this episode's OpenAI endpoint, with its /v1. The first use opens it."""
        return self.capture.base_url

    @property
    def api_key(self) -> str:
        """Key of the endpoint."""
        return self.capture.api_key

    @property
    def capture(self) -> Capture:
        """The record of the calls that arrive at ``base_url``. Raises AgentError without a gateway."""
        if self._capture is None:
            if self._gateway is None:
                raise AgentError("this session has no gateway: only a RolloutWorker has base_url")
            self._capture = self._gateway.open(self)
        return self._capture

    async def generate(
        self,
        token_ids: Sequence[int],
        spec: SamplingSpec | None = None,
        on_tokens: Tokens | None = None,
        *,
        policy: str = "",
        or_trained: bool = False,
    ) -> Completion:
        """Sample one completion after ``token_ids``; ``spec``: with other settings than those of the trial, n 1.

        ``on_tokens`` receives its tokens as they are sampled; the last ones may come with the result only. ``policy``:
        name of a pinned version; with ``or_trained`` any other name is the policy in training.
        """
        number, begin = self._number, time.perf_counter()
        self._number += 1
        with span("generate", self._calls.unit_of(self.episode), call=number) as generate:
            previous = self._previous.get(policy) or self._previous.get("")
            settings, chosen = self.spec if spec is None else spec, (policy, or_trained)
            completion = await self._calls.generate(
                self.episode, number, token_ids, settings, previous, on_tokens, chosen
            )
            generate.facts |= {"tokens": len(completion.tokens), "end": completion.finish_reason}
        self.seconds += time.perf_counter() - begin
        self.sampled += len(completion.tokens)
        self.last = (token_ids, completion)
        if completion.route:
            self._previous[completion.policy] = (completion.route[-1][0], int(completion.versions[-1]))
        if spec is None or (temperature := _temperature(spec)) == _temperature(self.spec):
            return completion
        return dataclasses.replace(completion, temperature=temperature)

    def check(self) -> None:
        """Raise the failure of a call at ``base_url`` that no retry made good: it spoils the episode's result."""
        if self._capture is not None and self._capture.error is not None:
            raise self._capture.error

    async def close(self) -> None:
        """End the calls at ``base_url``; later ones are refused."""
        if self._capture is not None:
            await self._capture.close()
