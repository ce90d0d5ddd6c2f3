"""The requests of one server: held back, running in its engine, interrupted, finished. On one event loop, no locks.

serve ──> [held?] ──> trip to the engine ──> all completions finished? ──no──> [held?] ──> ...
             │ abort: ends with the tokens so far     └──yes──> results

open completions of a request ──pieces──> engine ──events──> hear: the tokens so far, which progress lines show
                                            └────replies──> take ──> finished, or open again (continues later)

A piece is all that is left of a completion: only an update, a pause or the death of the engine cuts it. Every request
is a stream, so that its client has its tokens when the engine dies. The engine searches stop strings only in the tokens
of one piece. ``take`` finds those that began in earlier tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from realsys.errors import GenerationError, ServerBusy
from realsys.generation.backend import RequestSnapshot
from realsys.generation.child.adapters import Adapters
from realsys.generation.child.contract import Piece, Reply
from realsys.generation.child.supervisor import EngineRun
from realsys.generation.completion import EMPTY, Completion
from realsys.generation.protocol import CONTINUES, UNNAMED, UNSYNCED, AdapterWeights, SamplingParams, not_default
from realsys.generation.sampling_rules import completion_seed, find_stop, window
from realsys.observe import spans
from realsys.types import I32, FinishReason

#: A trip waits in the engine's queue, too. The supervisor ends it much earlier, when the engine samples nothing.
_TRIP_TIMEOUT_S = 86400.0
_RECALL_INTERVAL_S = 0.25
_RECALL_TIMEOUT_S = 60.0
#: Tokens between two events of a completion whose caller does not wait for each token. An event takes about 0.24 ms of
#: SGLang's HTTP process and 0.1 ms of this one, so at 10,000 tokens/s a fifth of a core. Fewer events would make the
#: death of a slow server cost more than generation.progress_s: a large model samples 8 tokens/s.
EVENT_TOKENS = 16
#: parameters that the engine gets in another form; all others go to it under their own name
_ADAPTED = {
    "max_new_tokens",
    "min_new_tokens",
    "stop",
    "stop_token_ids",
    "n",
    "sampling_seed",
    "answer_prefix",
    "top_logprobs_num",
    "priority",
}


class Traffic:
    """Owns the open requests.

    version, path  of the weights that the engine has now; UNSYNCED and "" for those it was started with
    holds          reasons why new trips wait
    keys           which cached keys the requests may use
    loads          counts the weights that the engine has had
    adapters       weights that requests may name; None: the engine was not started for them
    """

    def __init__(self, name: str, max_answers: int, keys: KeptKeys) -> None:
        self._name = name  # of the engine, for messages
        self._max_answers = max_answers
        self.keys = keys
        self._requests: dict[str, SplitRequest] = {}
        self._serials = itertools.count()
        self.run: EngineRun | None = None
        self.failure: str | None = f"{name} is starting"  # reason while ``run`` is None
        self.version = UNSYNCED
        self.path = ""
        self.loads = 0
        self.adapters: Adapters | None = None
        self.holds: set[str] = set()
        self.tokens = 0  # received from the engine
        self.input_tokens = 0  # sent to the engine
        self.reused_tokens = 0  # input tokens whose keys were in its cache
        self._busy_s = 0.0
        self._busy_since = 0.0

    # ---- the run

    def up(self, run: EngineRun) -> None:
        """Note that the engine serves, with the weights that it was started with."""
        self._set_run(run, None)

    def down(self, reason: str) -> None:
        """Note that it does not serve. Running requests fail with their connection, those held back fail here."""
        self._set_run(None, reason)
        for request in self._requests.values():
            request.let_go(self._unserved())

    def _set_run(self, run: EngineRun | None, failure: str | None) -> None:
        self.run = run
        self.failure = failure
        self.unloaded()

    def unloaded(self) -> None:
        """Note that the engine no longer has the weights of a version, and none of their keys."""
        self.version = UNSYNCED
        self.path = ""
        self.loads += 1
        self.keys.restart(UNSYNCED)

    def loaded(self, version: int, *, same: bool = False) -> None:
        """Note the version that the engine has now. ``same``: its weights are those of the version before."""
        if not same and self.keys.drops(self.version, version):
            for request in self._requests.values():
                request.keys = None
        self.keys.loaded(self.version, version, same=same)
        self.loads += not same
        self.version = version

    def serving(self) -> EngineRun:
        """Return the run. Raises GenerationError while the engine does not serve."""
        if self.run is None:
            raise self._unserved()
        return self.run

    # ---- requests

    async def serve(self, request: SplitRequest) -> list[Completion]:
        """Return the completions. Raises GenerationError if the queue is full, or the engine refuses or loses it."""
        self.serving()
        if request.rid in self._requests:
            raise GenerationError(f"rid={request.rid!r} is the id of a request in progress; ids must be unique")
        waiting = sum(self.open_completions())
        if waiting + request.params.n > self._max_answers:
            raise ServerBusy(
                f"queue full: {waiting} completions are open and {request.params.n} more were requested, "
                f"max_answers={self._max_answers}; try again later or another server"
            )
        self._requests[request.rid] = request
        try:
            while request.open and not request.aborted:
                if self.holds:
                    await request.held_back()
                elif self.adapters is not None and not self.adapters.enter(request):
                    await self.adapters.load(request)
                else:
                    await self._trip(request)
            return request.results()
        finally:
            del self._requests[request.rid]
            if self.adapters is not None:
                self.adapters.leave(request)

    async def _trip(self, request: SplitRequest) -> None:
        run, version = self.serving(), self.version
        request.recalled = False
        if request.adapter is not None:
            version = request.adapter.version
            request.keys = KeyNamespace(None, version)  # an engine keeps the keys of its adapters apart
        request.keys, request.sent_at = request.keys or self.keys.current, version
        pieces = request.pieces(self._serials)
        if not self.under_way():
            self._busy_since = time.perf_counter()
        begin, open_now = spans.now(), [k for k, one in enumerate(request.sampled) if one.running]
        hear = partial(self._hear, request, open_now)
        request.trip = asyncio.ensure_future(run.api.generate(pieces, _TRIP_TIMEOUT_S, hear))
        try:
            replies = await request.trip
        finally:
            request.trip = None
            request.heard.clear()
            request.shown.clear()
            if not self.under_way():
                self._busy_s += time.perf_counter() - self._busy_since
        # Without a report from the engine our version is right: it cannot change while a trip is under way (Updater).
        request.take(replies, None if run.reports and request.adapter is None else version)
        for index, reply in zip(open_now, replies, strict=True):
            _record_phases(f"{request.rid}#{index}", begin, reply, version)
        self.input_tokens += sum(len(piece.input_ids) for piece in pieces)
        self.reused_tokens += sum(reply.meta_info.cached_tokens for reply in replies)

    def _hear(self, request: SplitRequest, numbers: Sequence[int], index: int, reply: Reply) -> None:
        self.tokens += request.hear(numbers[index], reply)

    def snapshot(self, rid: str, proofs: int) -> RequestSnapshot | None:
        """Return the state of a request; None if no request has that id. ``proofs`` that SGLang samples: they count."""
        request = self._requests.get(rid)
        return None if request is None else request.snapshot(self.tokens + proofs)

    async def moves(self, rid: str) -> None:
        """Return when a request comes back from the engine, has new tokens there, or is no longer held back."""
        request = self._requests[rid]
        step = request.trip or request.go
        if step is None or step.done():
            await asyncio.sleep(0)  # ``serve`` is about to take its next step
        else:
            request.news = request.news or asyncio.get_running_loop().create_future()
            await asyncio.wait({step, request.news}, return_when=asyncio.FIRST_COMPLETED)

    def hold(self, why: str) -> None:
        """Start no trip until ``release`` is called for every hold."""
        self.holds.add(why)

    def release(self, why: str) -> None:
        self.holds.discard(why)
        if not self.holds:
            for request in self._requests.values():
                request.let_go()

    def under_way(self) -> list[SplitRequest]:
        return [request for request in self._requests.values() if request.trip is not None]

    def divisible(self) -> list[SplitRequest]:
        """Return the running requests that can continue as new ones.

        An engine tells the versions of tokens at the end of a piece: a piece that is shown before must have only one.
        """
        return [request for request in self.under_way() if not request.params.structural_tag]

    # ---- interruption

    def abort(self, rid: str | None = None) -> list[SplitRequest]:
        """Mark one request, or all, to end with the tokens so far. Returns those that the engine must return."""
        chosen = [r for r in self._requests.values() if rid is None or r.rid == rid]
        for request in chosen:
            request.aborted = True
            request.let_go()
        return [request for request in chosen if request.trip is not None]

    def __contains__(self, rid: str) -> bool:
        return rid in self._requests

    async def recall(self, requests: Iterable[SplitRequest]) -> None:
        """Make the engine return these requests early. Those not aborted continue once nothing holds them.

        Raises GenerationError if the engine does not return them in time.
        """
        trips = {request.trip: request for request in requests if request.trip is not None}
        for request in trips.values():
            request.recalled = True
        deadline = time.monotonic() + _RECALL_TIMEOUT_S
        while left := {trip for trip in trips if not trip.done()}:
            if time.monotonic() > deadline:
                raise GenerationError(f"{self._name} did not end {len(left)} requests within {_RECALL_TIMEOUT_S:g} s")
            # Repeated, because the engine forgets an abort for a request that it has not read yet.
            api = self.serving().api
            if len(left) == len(self.under_way()):
                await api.abort_all()
            else:
                await api.abort([rid for trip in left for rid in trips[trip].rids])
            await asyncio.wait(left, timeout=_RECALL_INTERVAL_S)

    async def drained(self, timeout_s: float) -> None:
        """Return when no request is running. Raises GenerationError if that takes too long."""
        trips = {request.trip for request in self.under_way() if request.trip is not None}
        if not trips:
            return
        _, left = await asyncio.wait(trips, timeout=timeout_s)
        if left:
            raise GenerationError(f"{len(left)} running requests did not end within {timeout_s:g} s", retryable=True)

    # ---- counters

    def open_completions(self) -> tuple[int, int]:
        """Return the numbers of completions in the engine, and held back."""
        running = sum(len(request.open) for request in self.under_way())
        return running, sum(len(request.open) for request in self._requests.values()) - running

    def busy_s(self) -> float:
        """Return the seconds in which at least one request was running."""
        return self._busy_s + (time.perf_counter() - self._busy_since if self.under_way() else 0.0)

    def _unserved(self) -> GenerationError:
        return GenerationError(self.failure or f"{self._name} does not serve", retryable=True)


def _record_phases(unit: str, begin: int, reply: Reply, version: int) -> None:
    """Record the spans of a piece that was sent at ``begin``. Without times all of it counts as decoding."""
    meta = reply.meta_info
    end = begin + int(1e9 * meta.e2e_latency) if meta.e2e_latency else spans.now()
    entered = min(end, begin + int(1e9 * meta.queue_time))
    prefilled = min(end, entered + int(1e9 * max(0.0, meta.prefill_finished_time - meta.forward_entry_time)))
    if entered > begin:
        spans.add("queue", begin, entered, unit)
    if prefilled > entered:
        spans.add("prefill", entered, prefilled, unit)
    spans.add("decode", prefilled, end, unit, version=version, tokens=len(reply.output_ids))


# ---- one request and its completions


@dataclass(slots=True, eq=False)
class _Sampled:
    """One completion of a request, so far."""

    seed: int
    completion: Completion = EMPTY
    running: bool = True

    @property
    def tokens(self) -> I32:
        return self.completion.tokens

    def end(self, reason: FinishReason, matched: int | str | None = None) -> None:
        self.completion = replace(self.completion, finish_reason=reason, matched=matched)
        self.running = False


@dataclass(slots=True, eq=False)
class SplitRequest:
    """One prompt and its completions.

    stops      stop tokens of the request and of the model
    tokenizer  finds stop strings; None if the model has none, then no request has stop strings
    """

    rid: str
    prompt: I32
    params: SamplingParams
    stops: tuple[int, ...]
    sampled: list[_Sampled]
    tokenizer: Tokenizer | None = None
    aborted: bool = False  # ends with the tokens so far
    recalled: bool = False  # the engine has to return its pieces early
    rids: list[str] = field(default_factory=list)  # ids of its pieces in the engine
    streams: bool = False  # its caller waits for each token
    trip: asyncio.Future[list[Reply]] | None = None  # pieces in the engine
    heard: dict[int, Reply] = field(default_factory=dict)  # completion -> tokens so far of its piece in the engine
    shown: dict[int, _Sampled] = field(default_factory=dict)  # what the last snapshot had of them
    news: asyncio.Future[None] | None = None  # resolved when ``heard`` has more
    go: asyncio.Future[None] | None = None  # while it is held back; resolved when it may be sent to the engine
    adapter: AdapterWeights | None = None  # weights that sample it; None: those that the engine has loaded
    adapter_name: str = ""  # of the adapter in the engine; "": none
    keys: KeyNamespace | None = None  # whose keys it may use, from its first trip on
    sent_at: int = UNSYNCED  # version that the engine had when its pieces were sent

    @classmethod
    def of(
        cls,
        rid: str,
        prompt: I32,
        params: SamplingParams,
        stops: tuple[int, ...],
        seed: int,
        tokenizer: Tokenizer | None = None,
    ) -> SplitRequest:
        return cls(
            rid,
            prompt,
            params,
            stops,
            [_Sampled(completion_seed(seed, k)) for k in range(params.n)],
            tokenizer,
        )

    async def held_back(self) -> None:
        """Wait until ``let_go``. Raises its error."""
        self.go = asyncio.get_running_loop().create_future()
        await self.go

    def let_go(self, error: Exception | None = None) -> None:
        """If the request is held back, let it continue, or fail with ``error``."""
        if self.go is not None and not self.go.done():
            self.go.set_result(None) if error is None else self.go.set_exception(error)

    def hear(self, number: int, reply: Reply) -> int:
        """Note the tokens so far of the piece of completion ``number``. Returns how many are new."""
        before, self.heard[number] = self.heard.get(number), reply
        if self.news is not None:
            self.news.set_result(None)
            self.news = None
        return reply.meta_info.completion_tokens - (before.meta_info.completion_tokens if before else 0)

    @property
    def open(self) -> list[_Sampled]:
        return [one for one in self.sampled if one.running]

    def pieces(self, serials: Iterator[int]) -> list[Piece]:
        """Return the rest of the work, in the engine's form."""
        prompt: list[int] = self.prompt.tolist()
        namespace = self.keys.name if self.keys is not None else None
        priority = max(self.params.priority, CONTINUES * any(len(one.tokens) for one in self.open))
        # All ids have one width, because SGLang aborts every request whose id begins with the given one.
        pieces = [
            Piece(
                f"{next(serials):012d}",
                prompt + one.tokens.tolist(),
                self._sampling(one),
                self.params.top_logprobs_num,
                priority,
                namespace,
                self.adapter_name,
            )
            for one in self.open
        ]
        self.rids = [piece.rid for piece in pieces]
        return pieces

    def take(self, replies: Sequence[Reply], version: int | None) -> None:
        """Add the replies for the open completions. ``version`` of all tokens; None: it is in the replies.

        Raises GenerationError if the numbers of tokens, log-probs and versions differ.
        """
        for one, reply in zip(self.open, replies, strict=True):
            begin = len(one.tokens)
            self._add(one, reply, version)
            self._finish(one, reply)
            self._cut(one, begin)

    def _add(self, one: _Sampled, reply: Reply, version: int | None, begin: int = 0) -> None:
        """Add the tokens of a reply from ``begin`` on."""
        segments = [(version, len(reply.output_ids) - begin)] if version is not None else _segments(reply)
        try:
            piece = Completion.of(
                reply.output_ids[begin:],
                reply.logprobs(begin),
                segments,
                kv_versions=self._oldest_keys(reply, segments),
                top=reply.top(begin) if self.params.top_logprobs_num else None,
            )
        except ValueError as error:
            raise GenerationError(f"the engine gave {error}", retryable=True) from error
        one.completion = Completion.joined([one.completion, piece])

    def snapshot(self, moved: int) -> RequestSnapshot:
        """Return its results as an abort would give them now."""
        sampled = [self._so_far(number, one) for number, one in enumerate(self.sampled)]
        running = frozenset(number for number, one in enumerate(sampled) if one.running)
        return RequestSnapshot([one.completion for one in sampled], running, moved)

    def _so_far(self, number: int, one: _Sampled) -> _Sampled:
        """Return a completion with the tokens of its piece in the engine.

        With a grammar they may have several versions, and are of no use to another server.
        """
        if (reply := self.heard.get(number)) is None or (self.params.structural_tag and not self.streams):
            return one
        so_far, before = self.shown.setdefault(number, replace(one)), len(one.tokens)
        if so_far.running:  # no stop string has ended it
            self._add(so_far, reply, self.sent_at, len(so_far.tokens) - before)
            self._cut(so_far, before)
        return so_far

    def results(self) -> list[Completion]:
        return [one.completion for one in self.sampled]

    def _oldest_keys(self, reply: Reply, segments: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the oldest version of the keys that the tokens of a piece may have attended to, as runs.

        Engines do not tell which version computed a key. A cached one may be as old as its namespace; all others are
        not older than the piece.
        """
        if self.keys is None or self.keys.name is None:
            return segments  # every load drops all keys
        oldest = self.keys.oldest if reply.meta_info.cached_tokens else self.sent_at
        return [(min(oldest, version), count) for version, count in segments]

    def _finish(self, one: _Sampled, reply: Reply) -> None:
        finish = reply.finish
        if finish.type != "abort":
            # A list is for stop tokens that match only together. realsys sends none, so the last token names it.
            one.end(finish.type, int(one.tokens[-1]) if isinstance(finish.matched, list) else finish.matched)
        elif len(one.tokens) >= self.params.max_new_tokens:
            one.end("length")
        elif self.aborted or not self.recalled or self.params.structural_tag:
            one.end("abort")

    def _cut(self, one: _Sampled, begin: int) -> None:
        """Cut the completion after a stop string that began before ``begin``, the first token of this piece."""
        earlier: list[int] = self.prompt[len(self.prompt) - self.params.answer_prefix :].tolist()
        if self.tokenizer is None or not self.params.stop or not begin + len(earlier):
            return
        text, reach = earlier + one.tokens.tolist(), window(self.params.stop)
        first = max(begin + 1, self.params.min_new_tokens)
        for count in range(first, min(len(one.tokens), begin + reach) + 1):
            end = len(earlier) + count
            if (match := find_stop(self.tokenizer, text[max(0, end - reach) : end], self.params.stop)) is not None:
                one.completion = one.completion.part(0, count)
                one.end("stop", match)
                return

    def _sampling(self, one: _Sampled) -> dict[str, Any]:
        done = len(one.tokens)
        sampling = {name: value for name, value in not_default(self.params).items() if name not in _ADAPTED}
        sampling["max_new_tokens"] = self.params.max_new_tokens - done
        sampling["stream_interval"] = 1 if self.streams else EVENT_TOKENS
        if self.params.min_new_tokens > done:
            sampling["min_new_tokens"] = self.params.min_new_tokens - done
        if self.params.stop:
            sampling["stop"] = list(self.params.stop)
        if self.stops:
            sampling["stop_token_ids"] = list(self.stops)
        return {**sampling, "sampling_seed": one.seed, "no_stop_trim": True}


def _segments(reply: Reply) -> list[tuple[int, int]]:
    spans = reply.meta_info.weight_versions
    if spans is None:
        raise GenerationError(
            "the engine gave a completion without weight_versions, although it reports them", retryable=True
        )
    return [
        (UNSYNCED if span.version == UNNAMED else int(span.version), span.end - span.start)
        for span in spans
        if span.end > span.start
    ]


# ---- which cached keys a request may use


@dataclass(frozen=True, slots=True)
class KeyNamespace:
    """A part of the engine's cache. Requests in one part share the keys of equal beginnings.

    name    None: the only part, whose keys are dropped when weights are loaded
    oldest  version of its oldest keys
    """

    name: str | None
    oldest: int


class KeptKeys:
    """Which keys of the engine's cache a request may use.

    With ``keep`` no load drops keys. Requests in progress keep their namespace; new ones get the current one, and a new
    namespace begins when the oldest keys of the current one are more than ``reuse`` versions older than the weights.
    The engine evicts the keys of the earlier ones as it needs their memory.
    """

    def __init__(self, *, keep: bool = False, reuse: int = 0) -> None:
        self.keep = keep
        self._reuse = reuse
        self._serials = itertools.count()
        self.current = KeyNamespace(None, UNSYNCED)
        self.restart(UNSYNCED)

    def drops(self, before: int, version: int) -> bool:
        """Return True if the load of ``version`` must drop all keys.

        Keys of weights without a version have no stamp. If the trainer has gone back, other weights may have the number
        of those before, or a lower one.
        """
        return not self.keep or before == UNSYNCED or version <= before

    def loaded(self, before: int, version: int, *, same: bool) -> None:
        """Note the weights that the engine has now. ``same``: as before, under another number."""
        if self.drops(before, version):
            self.restart(version)
        elif same and self.current.oldest == before:
            self.current = KeyNamespace(self.current.name, version)
        elif version - self.current.oldest > self._reuse:
            self.restart(version)

    def restart(self, version: int) -> None:
        """Begin a namespace without keys."""
        self.current = KeyNamespace(f"{next(self._serials)}" if self.keep else None, version)
