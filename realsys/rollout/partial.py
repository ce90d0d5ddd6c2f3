"""Partial rollouts: a call of the engine, whose answers survive the server that began them.

    schedule ──> generate n answers ──> all finished ──> done
       ^               │ some aborted, a piece is full, or the server failed
       └── each unfinished answer goes on from prompt + its tokens, on whichever server the manager names next

Tokens, log-probs and versions of all segments are kept as they came; nothing is tokenised or recomputed. By the paper's
Proposition 1 the concatenation is a sample of one behaviour policy, whose log-probs are the recorded ones.

A ticket may have many calls under way. Each has a name that is unique in its attempt, which is part of its request ids
(``ticket.attempt.call.trip``) and of its reservation. The next request for a server names the calls that have ended, so
that a tool that runs for long keeps no load on a server.

With ``new_tokens_per_chunk`` an answer is asked for in pieces, and the manager is asked between them: a long answer is
then not bound to the server that began it. Its sticky routing names the same one as long as that is good.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from realsys.errors import GenerationError
from realsys.generation.client import Generated, SamplingSpec
from realsys.manager.ledger.order import sampling_seed
from realsys.manager.messages import MOST_RELEASED, ScheduleReply, ScheduleRequest
from realsys.manager.routing.prefix import prefix_hashes
from realsys.types import FinishReason, Ticket

log = logging.getLogger(__name__)

MAX_FAILURES = 8  # trips on which a server failed, per rollout
MAX_STALLED = 20  # trips in a row that brought no token
FIRST_DELAY_S, LAST_DELAY_S = 0.05, 1.0  # after a trip that brought no token; doubles


class Scheduler(Protocol):
    """The part of ManagerClient that is needed here."""

    async def schedule(self, request: ScheduleRequest) -> ScheduleReply: ...


class Generator(Protocol):
    """The part of GenerationClient that is needed here."""

    async def generate(
        self, url: str, input_ids: Sequence[int], spec: SamplingSpec, *, rid: str, seed: int
    ) -> list[Generated]: ...


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the engine: ``spec.n`` completions after ``token_ids``.

    name      unique in the attempt of its ticket
    seed      of the first completion; completion k has seed + k if it is asked for alone
    previous  (server, version) of the episode's call before: the server may have these tokens in its cache
    """

    ticket: Ticket
    name: str
    token_ids: list[int]
    spec: SamplingSpec
    seed: int
    previous: tuple[str, int] | None = None

    @property
    def rid(self) -> str:
        return f"{self.ticket.ticket_id}.{self.ticket.attempt}.{self.name}"


#: Takes the number of a completion in its call, and the completion.
Deliver = Callable[[int, Generated], None]


def _ignore(number: int, completion: Generated) -> None:
    """Do nothing with a completion: the caller waits for all of them."""


@dataclass(slots=True)
class _Answer:
    """One answer in the making: its segments so far."""

    index: int
    budget: int  # tokens it may still have
    segments: list[Generated] = field(default_factory=list)
    finish_reason: FinishReason = "abort"
    pending: bool = True
    route: list[tuple[str, int]] = field(default_factory=list)  # (server, tokens) of the segments

    @property
    def length(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    def tokens(self) -> list[int]:
        return [int(token) for segment in self.segments for token in segment.tokens]

    def extend(self, segment: Generated, asked: int, server: str) -> None:
        """Add what came of a request to ``server`` for at most ``asked`` tokens."""
        if len(segment.tokens) or segment.finish_reason != "abort":
            self.segments.append(segment)
        if len(segment.tokens):
            self.route.append((server, len(segment.tokens)))
        self.budget -= len(segment.tokens)
        # A server may cut an answer short of what was asked for, at the end of its context: that is the end.
        cut = segment.finish_reason == "abort" or (segment.finish_reason == "length" and len(segment.tokens) >= asked)
        self.pending = cut and self.budget > 0
        # An abort on the very last token leaves nothing to go on with.
        self.finish_reason = "length" if cut and self.budget <= 0 else segment.finish_reason

    def join(self) -> Generated:
        if len(self.segments) == 1:
            only = self.segments[0]
            return Generated(only.tokens, only.logprobs, only.versions, self.finish_reason, tuple(self.route))
        return Generated(
            np.concatenate([segment.tokens for segment in self.segments]),
            np.concatenate([segment.logprobs for segment in self.segments]),
            np.concatenate([segment.versions for segment in self.segments]),
            self.finish_reason,
            tuple(self.route),
        )


class PartialRolloutManager:
    """Runs calls of the engine to their end, across weight updates and deaths of servers."""

    def __init__(self, manager: Scheduler, generator: Generator) -> None:
        self._manager = manager
        self._generator = generator
        self._ended: dict[tuple[str, int], list[str]] = {}  # (ticket, attempt) -> calls the manager is to hear of
        self.continued = 0  # answers that went on in a further segment, since the start
        self.failures = 0  # requests that a server failed

    async def generate(self, call: Call, deliver: Deliver = _ignore) -> list[Generated]:
        """``call.spec.n`` answers, each with the tokens of all its segments and the finish reason of the last.

        ``deliver``: called with each answer when it has ended, while others go on. Raises GenerationError when a
        request is refused or too many trips fail, and what ``schedule`` raises.
        """
        try:
            return await self._generate(call, deliver)
        finally:
            self._ended.setdefault((call.ticket.ticket_id, call.ticket.attempt), []).append(call.name)

    def forget(self, ticket: Ticket) -> None:
        """The attempt is over: its end releases all its reservations, so the manager need not hear of its calls."""
        self._ended.pop((ticket.ticket_id, ticket.attempt), None)

    async def _generate(self, call: Call, deliver: Deliver) -> list[Generated]:
        prefix = prefix_hashes(call.token_ids)
        answers = [_Answer(k, call.spec.max_new_tokens) for k in range(call.spec.n)]
        ended: dict[int, Generated] = {}
        failed: tuple[str, str] | None = None  # server, failure
        trip = failures = stalled = 0
        delay = FIRST_DELAY_S
        while pending := [answer for answer in answers if answer.pending]:
            before = sum(answer.length for answer in pending)
            request = _schedule_request(call, prefix, pending, failed)
            request.released = self._take_ended()
            place = await self._manager.schedule(request)
            problem = await self._trip(call, trip, pending, place)
            trip += 1
            failed = (place.server, problem) if problem else None
            failures += bool(problem)
            progress = sum(answer.length for answer in pending) > before or not any(a.pending for a in pending)
            stalled, delay = (0, FIRST_DELAY_S) if progress else (stalled + 1, delay)
            for answer in pending:
                if not answer.pending:
                    ended[answer.index] = answer.join()
                    deliver(answer.index, ended[answer.index])
            if failures > MAX_FAILURES or stalled > MAX_STALLED:
                what = f"{failures} failures and {stalled} trips without a token in {trip} trips"
                raise GenerationError(
                    f"ticket {call.ticket.ticket_id}: given up after {what}; last: {problem or 'aborted'}"
                )
            if not progress:
                await asyncio.sleep(delay)  # a server that is updating or dying says no more than this
                delay = min(2 * delay, LAST_DELAY_S)
        return [ended[answer.index] for answer in answers]

    def _take_ended(self) -> list[tuple[str, int, str]]:
        """Calls that have ended since the last request, as many as one request may name."""
        taken: list[tuple[str, int, str]] = []
        while self._ended and len(taken) < MOST_RELEASED:
            attempt, calls = next(iter(self._ended.items()))
            taken.append((*attempt, calls.pop()))
            if not calls:
                del self._ended[attempt]
        return taken

    async def _trip(self, call: Call, trip: int, pending: list[_Answer], place: ScheduleReply) -> str:
        """One visit to a server: extends the pending answers; the failure, or "". Raises GenerationError if refused."""
        rid, spec = f"{call.rid}.{trip}", call.spec
        if len(pending) == spec.n and not any(answer.segments for answer in pending):
            piece = _piece(spec, spec.max_new_tokens)
            if piece < spec.max_new_tokens:
                spec = replace(spec, max_new_tokens=piece, min_new_tokens=min(piece, spec.min_new_tokens))
            return await self._request(place, call.token_ids, spec, rid, call.seed, pending)
        self.continued += sum(bool(answer.segments) for answer in pending)
        tasks = [self._continue(place, call, f"{rid}.{a.index}", a) for a in pending]
        # Every answer's tokens are kept, also when another one is refused.
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return next((result for result in results if isinstance(result, str) and result), "")

    async def _continue(self, place: ScheduleReply, call: Call, rid: str, answer: _Answer) -> str:
        spec = call.spec
        piece = _piece(spec, answer.budget)
        rest = replace(
            spec,
            n=1,
            max_new_tokens=piece,
            min_new_tokens=min(piece, max(0, spec.min_new_tokens - answer.length)),
            answer_prefix=answer.length,
        )
        seed = call.seed + answer.index
        # A seed's random numbers start over with each request: the same one again would repeat the first segment's.
        seed = sampling_seed(seed, answer.length) if answer.segments else seed
        return await self._request(place, call.token_ids + answer.tokens(), rest, rid, seed, [answer])

    async def _request(
        self,
        place: ScheduleReply,
        input_ids: list[int],
        spec: SamplingSpec,
        rid: str,
        seed: int,
        answers: list[_Answer],
    ) -> str:
        try:
            segments = await self._generator.generate(place.url, input_ids, spec, rid=rid, seed=seed)
        except GenerationError as error:
            if not error.retryable:
                raise
            self.failures += 1
            log.warning("request %s: %s; going on elsewhere", rid, error)
            return str(error)
        for answer, segment in zip(answers, segments, strict=True):
            answer.extend(segment, spec.max_new_tokens, place.server)
        return ""


def _piece(spec: SamplingSpec, budget: int) -> int:
    """Tokens to ask for at once, of those that an answer may still have."""
    return min(budget, spec.new_tokens_per_chunk or budget)


def _schedule_request(
    call: Call, prefix: list[int], pending: list[_Answer], failed: tuple[str, str] | None
) -> ScheduleRequest:
    """Ask for a server for the pending answers, with the one that failed them."""
    return ScheduleRequest(
        call.ticket.ticket_id,
        call.ticket.attempt,
        prompt_len=len(call.token_ids) + max(answer.length for answer in pending),
        max_new_tokens=max(answer.budget for answer in pending),
        n=len(pending),
        failed_server=failed[0] if failed else None,
        failure=failed[1][:2000] if failed else None,
        prefix=prefix,
        call=call.name,
        previous=call.previous,
    )
