"""Partial rollouts: an answer survives the server that began it.

    schedule ──> generate n answers ──> all finished ──> done
       ^               │ some aborted, a piece is full, or the server failed
       └── each unfinished answer goes on from prompt + its tokens, on whichever server the manager names next

Tokens, log-probs and versions of all segments are kept as they came; nothing is tokenised or recomputed. By the paper's
Proposition 1 the concatenation is a sample of one behaviour policy, whose log-probs are the recorded ones.

With ``new_tokens_per_chunk`` an answer is asked for in pieces, and the manager is asked between them: a long answer is
then not bound to the server that began it. Its sticky routing names the same one as long as that is good.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from realsys.admission.messages import ScheduleReply, ScheduleRequest
from realsys.admission.order import sampling_seed
from realsys.admission.prefix import prefix_hashes
from realsys.errors import GenerationError
from realsys.generation.client import Generated, SamplingSpec
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
            return replace(self.segments[0], finish_reason=self.finish_reason, route=tuple(self.route))
        return Generated(
            np.concatenate([segment.tokens for segment in self.segments]),
            np.concatenate([segment.logprobs for segment in self.segments]),
            np.concatenate([segment.versions for segment in self.segments]),
            self.finish_reason,
            tuple(self.route),
        )


class PartialRolloutManager:
    """Runs the generation of one ticket to its end, across weight updates and deaths of servers."""

    def __init__(self, manager: Scheduler, generator: Generator) -> None:
        self._manager, self._generator = manager, generator
        self.continued = 0  # answers that went on in a further segment, since the start
        self.failures = 0  # requests that a server failed

    async def generate(self, ticket: Ticket, prompt: Sequence[int], spec: SamplingSpec) -> list[Generated]:
        """``spec.n`` answers, each with the tokens of all its segments and the finish reason of the last.

        Raises GenerationError when a request is refused or too many trips fail, and what ``schedule`` raises.
        """
        prompt = list(prompt)
        prefix = prefix_hashes(prompt)
        answers = [_Answer(k, spec.max_new_tokens) for k in range(spec.n)]
        failed: tuple[str, str] | None = None  # server, failure
        trip = failures = stalled = 0
        delay = FIRST_DELAY_S
        while pending := [answer for answer in answers if answer.pending]:
            before = sum(answer.length for answer in pending)
            place = await self._manager.schedule(_schedule_request(ticket, len(prompt), prefix, pending, failed))
            problem = await self._trip(ticket, trip, prompt, spec, pending, place)
            trip += 1
            failed = (place.server, problem) if problem else None
            failures += bool(problem)
            progress = sum(answer.length for answer in pending) > before or not any(a.pending for a in pending)
            stalled, delay = (0, FIRST_DELAY_S) if progress else (stalled + 1, delay)
            if failures > MAX_FAILURES or stalled > MAX_STALLED:
                what = f"{failures} failures and {stalled} trips without a token in {trip} trips"
                raise GenerationError(f"ticket {ticket.ticket_id}: given up after {what}; last: {problem or 'aborted'}")
            if not progress:
                await asyncio.sleep(delay)  # a server that is updating or dying says no more than this
                delay = min(2 * delay, LAST_DELAY_S)
        return [answer.join() for answer in answers]

    async def _trip(
        self,
        ticket: Ticket,
        trip: int,
        prompt: list[int],
        spec: SamplingSpec,
        pending: list[_Answer],
        place: ScheduleReply,
    ) -> str:
        """One visit to a server: extends the pending answers; the failure, or "". Raises GenerationError if refused."""
        rid = f"{ticket.ticket_id}.{ticket.attempt}.{trip}"
        if len(pending) == spec.n and not any(answer.segments for answer in pending):
            piece = _piece(spec, spec.max_new_tokens)
            first = replace(spec, max_new_tokens=piece, min_new_tokens=min(piece, spec.min_new_tokens))
            return await self._request(place, prompt, first, rid, ticket.seed, pending)
        self.continued += sum(bool(answer.segments) for answer in pending)
        tasks = [self._continue(place, prompt, spec, f"{rid}.{a.index}", ticket.seed, a) for a in pending]
        # Every answer's tokens are kept, also when another one is refused.
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return next((result for result in results if isinstance(result, str) and result), "")

    async def _continue(
        self, place: ScheduleReply, prompt: list[int], spec: SamplingSpec, rid: str, seed: int, answer: _Answer
    ) -> str:
        piece = _piece(spec, answer.budget)
        rest = replace(
            spec,
            n=1,
            max_new_tokens=piece,
            min_new_tokens=min(piece, max(0, spec.min_new_tokens - answer.length)),
            answer_prefix=answer.length,
        )
        # A seed's random numbers start over with each request: the same one again would repeat the first segment's.
        seed = sampling_seed(seed, answer.index, answer.length) if answer.segments else seed + answer.index
        return await self._request(place, prompt + answer.tokens(), rest, rid, seed, [answer])

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
    ticket: Ticket, prompt_len: int, prefix: list[int], pending: list[_Answer], failed: tuple[str, str] | None
) -> ScheduleRequest:
    """What the pending answers will need, and which server failed them."""
    return ScheduleRequest(
        ticket.ticket_id,
        ticket.attempt,
        prompt_len=prompt_len + max(answer.length for answer in pending),
        max_new_tokens=max(answer.budget for answer in pending),
        n=len(pending),
        failed_server=failed[0] if failed else None,
        failure=failed[1][:2000] if failed else None,
        prefix=prefix,
    )
