"""Partial rollouts: calls of the engine whose completions survive the server that began them.

    schedule ──> generate n completions ──> all finished ──> done
       ^               │ some aborted, a piece is full, or the server is busy, silent or failed
       └── each unfinished completion continues from prompt + its tokens, on the server that the manager names next

A server sends the tokens so far every ``generation.progress_s`` seconds, so its death costs at most the tokens since
then. Only a failure is reported to the manager (`blame-needs-evidence`). A busy server is avoided. The worker looks
first whether a silent server samples.

Tokens, log-probs and versions of all segments stay unchanged; nothing is tokenised again or recomputed. By the paper's
Proposition 1 the concatenation is a sample of one behaviour policy, whose log-probs are the recorded ones.

A ticket may have many calls in progress. Each has a name that is unique in its attempt and is part of its request ids
(``ticket.attempt.call.trip``) and of its reservation. The next request for a server names the calls that have ended, so
that an agent whose tool runs for a long time reserves no load on a server.

With ``new_tokens_per_chunk`` a completion is sampled in pieces, with a request to the manager between them: a long
completion is then not bound to the server that began it. Sticky routing names the same server while that is best.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from realsys.errors import GenerationError, ServerBusy, ServerSilent
from realsys.generation.client import GenerationClient, Received, SamplingSpec
from realsys.generation.completion import Completion
from realsys.generation.protocol import CONTINUES
from realsys.manager.messages import MOST_RELEASED, ScheduleReply, ScheduleRequest, prefix_hashes
from realsys.observe.spans import span
from realsys.types import I32, FinishReason, Ticket, sampling_seed

log = logging.getLogger(__name__)

MAX_FAILURES = 8  # trips on which a server failed, per call
MAX_STALLED = 20  # trips in a row without a token
MAX_BUSY = 3600  # trips in a row to servers with a full queue: about an hour
#: delay after a trip without a token; doubles from the first to the last
FIRST_DELAY_S = 0.05
LAST_DELAY_S = 1.0


class CallScheduler(Protocol):
    """ManagerClient, or the one server of `realsys play`."""

    async def schedule(self, request: ScheduleRequest) -> ScheduleReply: ...


#: Receives the number of a completion in its call, and tokens that follow those of earlier calls.
OnTokens = Callable[[int, Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One call of the engine: ``spec.n`` completions after ``token_ids``.

    name      unique in the attempt of its ticket
    seed      seed of the first completion; completion k has seed + k if a request samples it alone
    previous  (server, version) of the episode's last call: the server may have these tokens in its cache
    on_tokens receives the new tokens of a completion as the servers sample them, with its number; None: not wanted
    policy    name of the pinned version that must sample it; "": the policy in training
    or_trained  a policy that is not pinned is the policy in training
    """

    ticket: Ticket
    name: str
    token_ids: list[int]
    spec: SamplingSpec
    seed: int
    previous: tuple[str, int] | None = None
    on_tokens: OnTokens | None = None
    policy: str = ""
    or_trained: bool = False

    @property
    def rid(self) -> str:
        return f"{self.ticket.unit}.{self.name}"


#: Receives the number of a completion in its call, and the completion.
Deliver = Callable[[int, Completion], None]


def _ignore(number: int, completion: Completion) -> None:
    """Do nothing with a completion: the caller waits for all of them."""


@dataclass(frozen=True, slots=True)
class _Trouble:
    """Reason why a trip brought less than it should. ``failed``: the server is reported; otherwise it is avoided."""

    server: str
    reason: str
    failed: bool = False


@dataclass(slots=True)
class _PartialCompletion:
    """One completion of a call: its segments so far. ``deliver`` gets it when it has ended."""

    index: int
    budget: int  # tokens that it may still have
    deliver: Deliver
    on_tokens: OnTokens | None = None
    told: int = 0  # tokens that ``on_tokens`` has
    segments: list[Completion] = field(default_factory=list)
    finish_reason: FinishReason = "abort"
    pending: bool = True
    route: list[tuple[str, int]] = field(default_factory=list)  # (server, tokens) of the segments
    pin: tuple[str, int] = ("", 0)  # name and version of the pin that samples it

    @property
    def length(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    def tokens(self) -> list[int]:
        return [int(token) for segment in self.segments for token in segment.tokens]

    def tell(self, tokens: Sequence[int] | I32) -> None:
        """Pass on what is new in ``tokens``, those so far of the request in progress."""
        if self.on_tokens is None or not (fresh := [int(token) for token in tokens[self.told - self.length :]]):
            return
        self.told += len(fresh)
        self.on_tokens(self.index, fresh)

    def extend(self, segment: Completion, limit: int, server: str) -> None:
        """Append the result of a request to ``server`` for at most ``limit`` tokens."""
        self.tell(segment.tokens)
        if len(segment.tokens) or segment.finish_reason != "abort":
            self.segments.append(segment)
        if len(segment.tokens):
            self.route.append((server, len(segment.tokens)))
        self.budget -= len(segment.tokens)
        # A server may return fewer tokens with reason "length", at the end of its context. To continue
        # there would give no token, so the completion ends.
        cut = segment.finish_reason == "abort" or (segment.finish_reason == "length" and len(segment.tokens) >= limit)
        self.pending = cut and self.budget > 0
        # After an abort at the very last token there is no budget to continue with.
        self.finish_reason = "length" if cut and self.budget <= 0 else segment.finish_reason
        if not self.pending:
            self.deliver(self.index, self.join())

    def restart(self, budget: int, what: str = "with a grammar") -> None:
        """Discard the tokens so far, which cannot be continued. Raises GenerationError if one was told."""
        if self.told:
            problem = f"a stream {what} was interrupted after {self.told} tokens: repeat the request"
            raise GenerationError(problem, retryable=True)
        log.warning("a completion %s was interrupted after %d tokens, and begins again", what, self.length)
        self.segments.clear()
        self.route.clear()
        self.budget = budget

    def abandon(self) -> None:
        """Deliver the tokens so far of a completion that is cancelled."""
        if self.pending and self.segments:
            self.finish_reason = "abort"
            self.deliver(self.index, self.join())

    def join(self) -> Completion:
        return dataclasses.replace(
            Completion.joined(self.segments),
            finish_reason=self.finish_reason,
            route=tuple(self.route),
            policy=self.pin[0],
        )


class ResumableEngine:
    """Runner of engine calls: it completes each call across weight updates and failures of servers."""

    def __init__(self, manager: CallScheduler, generator: GenerationClient) -> None:
        self._manager = manager
        self._generator = generator
        self._ended: dict[tuple[str, int], list[str]] = {}  # (ticket, attempt) -> ended calls, not reported yet
        self.continued = 0  # completions that got another segment, since the start
        self.failures = 0  # requests that failed at a server

    async def generate(self, call: EngineCall, deliver: Deliver = _ignore) -> list[Completion]:
        """Sample ``call.spec.n`` completions, with the tokens of all segments and the last finish reason.

        ``deliver`` receives each completion when it has ended, while others continue; if this call is cancelled, the
        tokens so far of each that has not, with reason ``abort``. Raises
        GenerationError if a request is refused or too many trips fail, and the errors of ``schedule``.
        """
        completions = [
            _PartialCompletion(k, call.spec.max_new_tokens, deliver, call.on_tokens) for k in range(call.spec.n)
        ]
        try:
            return await self._generate(call, completions)
        except asyncio.CancelledError:
            for completion in completions:
                completion.abandon()
            raise
        finally:
            self._ended.setdefault((call.ticket.ticket_id, call.ticket.attempt), []).append(call.name)

    def discard(self, ticket: Ticket) -> None:
        """Discard the ended calls of an attempt that is over: its end releases all its reservations."""
        self._ended.pop((ticket.ticket_id, ticket.attempt), None)

    def _take_ended(self) -> list[tuple[str, int, str]]:
        """Return ended calls, as many as one request may name, and forget them."""
        taken: list[tuple[str, int, str]] = []
        while self._ended and len(taken) < MOST_RELEASED:
            attempt, calls = next(iter(self._ended.items()))
            taken.append((*attempt, calls.pop()))
            if not calls:
                del self._ended[attempt]
        return taken

    async def _generate(self, call: EngineCall, completions: list[_PartialCompletion]) -> list[Completion]:
        prefix = prefix_hashes(call.token_ids)
        trouble: _Trouble | None = None  # trouble of the last trip
        trip = failures = stalled = busy = 0
        delay = FIRST_DELAY_S
        while pending := [completion for completion in completions if completion.pending]:
            for completion in pending:
                if call.spec.structural_tag and completion.segments:
                    completion.restart(call.spec.max_new_tokens)
            before = sum(completion.length for completion in pending)
            failed = trouble if trouble and trouble.failed else None
            request = ScheduleRequest(
                call.ticket.ticket_id,
                call.ticket.attempt,
                prompt_len=len(call.token_ids) + max(completion.length for completion in pending),
                max_new_tokens=max(completion.budget for completion in pending),
                n=len(pending),
                failed_server=failed.server if failed else None,
                failure=failed.reason[:2000] if failed else None,
                prefix=prefix,
                call=call.name,
                previous=call.previous,
                avoid=trouble.server if trouble and not trouble.failed else None,
                policy=call.policy,
                or_trained=call.or_trained,
            )
            request.released = self._take_ended()
            with span("route", f"{call.ticket.unit}/{call.name.partition('.')[0]}"):
                place = await self._manager.schedule(request)
            pin = (place.policy, place.version if place.policy else 0)
            for completion in pending:
                if completion.segments and completion.pin != pin:
                    completion.restart(call.spec.max_new_tokens, f"of {call.policy!r}, which was pinned anew,")
                completion.pin = pin
            trouble = await self._trip(call, trip, pending, place)
            trip += 1
            failures += trouble is not None and trouble.failed
            kept = not call.spec.structural_tag and sum(completion.length for completion in pending) > before
            progress = kept or not any(completion.pending for completion in pending)
            if progress:
                stalled, busy, delay = 0, 0, FIRST_DELAY_S
            elif trouble is not None and not trouble.failed:
                busy += 1
            else:
                stalled += 1
            if failures > MAX_FAILURES or stalled > MAX_STALLED or busy > MAX_BUSY:
                what = f"{failures} failures and {stalled + busy} trips without a token in {trip} trips"
                last = trouble.reason if trouble else "aborted"
                raise GenerationError(f"ticket {call.ticket.ticket_id}: cancelled after {what}; last: {last}")
            if not progress:
                # A server that updates, stops or is full ends each request immediately. Without a delay the loop
                # would spin.
                await asyncio.sleep(delay)
                delay = min(2 * delay, LAST_DELAY_S)
        return [completion.join() for completion in completions]

    async def _trip(
        self, call: EngineCall, trip: int, pending: list[_PartialCompletion], place: ScheduleReply
    ) -> _Trouble | None:
        """Extend the pending completions at one server. Return its trouble, a failure before any other.

        Raises GenerationError if the server refuses the request.
        """
        rid, spec = f"{call.rid}.{trip}", call.spec
        if call.previous is not None or any(completion.segments for completion in pending):
            call = dataclasses.replace(call, spec=(spec := replace(spec, priority=CONTINUES)))
        if len(pending) == spec.n and not any(completion.segments for completion in pending):
            piece = _piece(spec, spec.max_new_tokens)
            if piece < spec.max_new_tokens:
                spec = replace(spec, max_new_tokens=piece, min_new_tokens=min(piece, spec.min_new_tokens))
            return await self._request(place, call.token_ids, spec, rid, call.seed, pending)
        self.continued += sum(bool(completion.segments) for completion in pending)
        tasks = [self._continue(place, call, f"{rid}.{a.index}", a) for a in pending]
        # return_exceptions, so that a refused request does not lose the tokens of the others.
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        troubles = [result for result in results if isinstance(result, _Trouble)]
        return max(troubles, key=lambda trouble: trouble.failed, default=None)

    async def _continue(
        self, place: ScheduleReply, call: EngineCall, rid: str, completion: _PartialCompletion
    ) -> _Trouble | None:
        spec = call.spec
        piece = _piece(spec, completion.budget)
        rest = replace(
            spec,
            n=1,
            max_new_tokens=piece,
            min_new_tokens=min(piece, max(0, spec.min_new_tokens - completion.length)),
            answer_prefix=completion.length,
        )
        seed = call.seed + completion.index
        # The random numbers of a seed start again with each request: with the same seed, the second
        # segment would be drawn with the numbers of the first one.
        seed = sampling_seed(seed, completion.length) if completion.segments else seed
        return await self._request(place, call.token_ids + completion.tokens(), rest, rid, seed, [completion])

    async def _request(
        self,
        place: ScheduleReply,
        input_ids: list[int],
        spec: SamplingSpec,
        rid: str,
        seed: int,
        completions: list[_PartialCompletion],
    ) -> _Trouble | None:
        ended: set[int] = set()
        streams = any(completion.on_tokens is not None for completion in completions)

        def extend(number: int, segment: Completion) -> None:
            if number not in ended:
                ended.add(number)
                completions[number].extend(_sampled_there(place, segment), spec.max_new_tokens, place.server)

        # A completion that has ended does not wait for the others of its request.
        received = Received(
            spec.n,
            lambda number: extend(number, received.completions[number]),
            (lambda number: completions[number].tell(received.completions[number].tokens)) if streams else None,
        )
        trouble = None
        try:
            segments = await self._generator.generate(place.url, input_ids, spec, rid=rid, seed=seed, received=received)
        except asyncio.CancelledError:
            for number, segment in enumerate(received.completions):
                extend(number, segment)
            raise
        except GenerationError as error:
            if not error.retryable:
                raise
            segments = received.completions
            trouble = _Trouble(place.server, str(error), await self._blames(error, place))
            self.failures += trouble.failed
            kept = sum(len(segment.tokens) for segment in segments)
            log.warning("request %s: %s; continuing elsewhere, after %d tokens that had arrived", rid, error, kept)
        for number, segment in enumerate(segments):
            extend(number, segment)
        return trouble

    async def _blames(self, error: GenerationError, place: ScheduleReply) -> bool:
        """Return True if the error is evidence against the server (`blame-needs-evidence`)."""
        if isinstance(error, ServerSilent):
            return not await self._generator.works(place.url)
        return not isinstance(error, ServerBusy)


def _sampled_there(place: ScheduleReply, segment: Completion) -> Completion:
    """Cut a segment where other weights begin than those of its place: the server has left a pin, or was given one."""
    other = segment.versions != place.version if place.policy else segment.versions < place.version
    if not other.any():
        return segment
    return dataclasses.replace(segment.part(0, int(other.argmax())), finish_reason="abort")


def _piece(spec: SamplingSpec, budget: int) -> int:
    """Return how many tokens of the remaining ``budget`` the next request samples: all of them under a grammar."""
    return budget if spec.structural_tag else min(budget, spec.new_tokens_per_chunk or budget)
