"""Schedule of completions: admission queue, slots, rows and length groups. Pure bookkeeping, no torch.

    submit ──> queue ──admit──> prefilling (has a slot) ──join──> running (and a full row of the KV cache) ──finish──>
                                    ^──────────────── suspend ────────────────┘

A *slot* is the place of a completion's tokens, log-probs and random numbers for its whole life. A *row* is its place
in the KV cache, which it leaves at its end (prefix_cache.py). Rows 0..n-1 are always the running completions, so that a
step works on slices. Completions of one request are admitted one by one as slots become free.

Attention of a decode step reads rows x (longest row) positions, and this reading dominates the step. Completions have
heavy-tailed lengths, so one long completion would make all others pay. ``arrange`` therefore cuts the rows into groups
of similar length, and each group is read up to its own longest row. All completions grow alike, so a layout stays good
until some end or join.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from realsys.errors import GenerationError, ServerBusy
from realsys.generation.completion import Completion
from realsys.generation.protocol import UNSYNCED, SamplingParams
from realsys.observe.spans import Phases, now
from realsys.types import I32, TopLogprobs

I64 = npt.NDArray[np.int64]

#: cost of moving a position (read and write), in positions read by attention
_MOVE_COST = 4
#: steps over which a re-arrangement must pay for its moves: completions end or join about that often
_HORIZON = 8
#: every group is a separate kernel call per layer
_MAX_GROUPS = 12


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and the completions of it. ``stops``: its stop tokens and those of the model."""

    rid: str
    prompt: I32
    params: SamplingParams
    seed: int
    stops: tuple[int, ...]
    done: Future[list[Completion]]
    failure: str = ""  # reason why it has no results
    admitted: int = 0  # completions taken from the queue so far
    queued_at: int = field(default_factory=now)
    running: list[LiveCompletion] = field(default_factory=list)
    results: dict[int, Completion] = field(default_factory=dict)
    key: bytes = field(init=False)  # sorts requests by prompt

    def __post_init__(self) -> None:
        # Big-endian: the order of the bytes is then the order of the tokens, which PrefixIndex needs.
        self.key = self.prompt.astype(">i4").tobytes()

    @property
    def waiting(self) -> int:
        return self.params.n - self.admitted


@dataclass(slots=True, eq=False)
class LiveCompletion:
    """One admitted completion, until it ends. ``length`` counts prompt and completion tokens.

    The last token is never in the cache. While it is prefilling, the first ``cached`` positions of its
    row are valid; while it runs, all but the last. ``kv_version``: version of its first key, the oldest.
    ``segments``: (version, kv_version, tokens) runs of its first tokens.
    """

    request: Request
    index: int
    slot: int
    length: int
    row: int = -1  # -1: nothing in the KV cache yet
    cached: int = 0
    kv_version: int = UNSYNCED
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    top: TopLogprobs = field(default_factory=list)  # one entry per token so far, if the request wants them
    spans: Phases = field(init=False)  # queue, prefill, decode: one of each per weight version that samples

    def __post_init__(self) -> None:
        self.spans = Phases(f"{self.request.rid}#{self.index}", "queue", self.request.queued_at)

    @property
    def key(self) -> bytes:
        return self.request.key

    @property
    def tokens(self) -> I32:
        """Tokens by which other sequences find it: those of its prompt."""
        return self.request.prompt

    @property
    def generated(self) -> int:
        return self.length - len(self.request.prompt)

    @property
    def completion_start(self) -> int:
        """Position of the completion's first token.

        It is before the end of the prompt if an earlier request began the completion.
        """
        return len(self.request.prompt) - self.request.params.answer_prefix

    @property
    def ban_length(self) -> int:
        """Length below which stop tokens must not be drawn."""
        return len(self.request.prompt) + self.request.params.min_new_tokens

    @property
    def limit(self) -> int:
        """Length at which the completion is cut."""
        return len(self.request.prompt) + self.request.params.max_new_tokens

    def runs(self, version: int, generated: int) -> list[tuple[int, int, int]]:
        """Return the segments of ``generated`` tokens; those since the last segment belong to ``version``."""
        count = generated - sum(count for *_, count in self.segments)
        if not count:
            return list(self.segments)
        before, last = self.segments[:-1], self.segments[-1:]
        if last and last[0][:2] == (version, self.kv_version):
            return [*before, (version, self.kv_version, last[0][2] + count)]
        return [*before, *last, (version, self.kv_version, count)]

    def close_segment(self, version: int) -> None:
        """Attribute the tokens since the last segment to ``version``."""
        before = sum(count for *_, count in self.segments)
        self.segments = self.runs(version, self.generated)
        if self.spans.name == "decode":
            self.spans.enter("decode", version=version, tokens=self.generated - before)

    def end_spans(self, result: Completion) -> None:
        """Record the last phase of a completion that has ended with ``result``."""
        tokens = len(result.tokens) - sum(count for *_, count in self.segments)
        decoded = tokens if self.spans.name == "decode" else 0
        facts = {"version": int(result.versions[-1]), "tokens": decoded} if decoded else {}
        self.spans.enter("", end=result.finish_reason, **facts)


class Scheduler:
    """Owner of slots, queue and prefill line. ``running`` is in row order after ``arrange``."""

    def __init__(self, max_running: int, max_queued: int, planner: LayoutPlanner) -> None:
        self.max_running = max_running
        self.max_queued = max_queued
        self.running: list[LiveCompletion] = []
        self.prefilling: list[LiveCompletion] = []
        self.queued = 0  # completions
        self._planner = planner
        self._queue: deque[Request] = deque()
        self._free_slots = list(range(max_running - 1, -1, -1))
        self._by_rid: dict[str, Request] = {}

    def submit(self, request: Request) -> None:
        """Queue a request behind those of its priority.

        Raises GenerationError if the queue is full or the id is in use.
        """
        if request.rid in self._by_rid:
            raise GenerationError(f"rid={request.rid!r} is the id of a request in progress: ids must be unique")
        count = request.params.n
        # Free slots count as queue: the next step admits that many.
        if self.queued + count > self.max_queued + len(self._free_slots):
            raise ServerBusy(
                f"queue full: {self.queued} completions wait and {count} more are requested, "
                f"max_queued={self.max_queued}: try again later or use another server"
            )
        self._by_rid[request.rid] = request
        place = bisect_right(self._queue, -request.params.priority, key=lambda queued: -queued.params.priority)
        self._queue.insert(place, request)
        self.queued += count

    def admit(self) -> list[LiveCompletion]:
        """Give free slots to queued completions, in the order of the queue."""
        admitted: list[LiveCompletion] = []
        while self._queue and self._free_slots:
            request = self._queue[0]
            completion = LiveCompletion(request, request.admitted, self._free_slots.pop(), len(request.prompt))
            request.admitted += 1
            request.running.append(completion)
            completion.spans.enter("prefill")
            admitted.append(completion)
            self.queued -= 1
            if not request.waiting:
                self._queue.popleft()
        self.prefilling += admitted
        return admitted

    def join(self, completions: Sequence[LiveCompletion]) -> None:
        """Let prefilled completions run. Call ``arrange`` before the next step."""
        joined = {id(completion) for completion in completions}
        for completion in completions:
            completion.spans.enter("decode", positions=completion.length)
        self.prefilling = [completion for completion in self.prefilling if id(completion) not in joined]
        self.running += completions

    def suspend(self) -> None:
        """Send all running completions back to prefill: no cached position is valid any more."""
        for completion in self.active:
            completion.row = -1
            completion.cached = 0
            completion.spans.name = "prefill"
        # Short ones first, so that most completions decode again soonest; new ones have waited less.
        self.prefilling = sorted(self.running, key=lambda completion: completion.length) + self.prefilling
        self.running = []

    def finish(self, ended: Sequence[tuple[LiveCompletion, Completion]]) -> list[Request]:
        """Free the slots of admitted completions. Returns the requests that are complete with them."""
        ended_ids = {id(completion) for completion, _ in ended}
        self.running = [completion for completion in self.running if id(completion) not in ended_ids]
        # An aborted completion may not have run yet.
        self.prefilling = [completion for completion in self.prefilling if id(completion) not in ended_ids]
        complete = []
        for completion, result in ended:
            completion.end_spans(result)
            self._free_slots.append(completion.slot)
            request = completion.request
            request.running.remove(completion)
            request.results[completion.index] = result
            complete += self._completed(request)
        return complete

    def drop_waiting(self, request: Request, result: Completion) -> list[Request]:
        """End the completions of a request that wait for a slot, each with ``result``.

        Returns the request if it is complete with them.
        """
        if not request.waiting:
            return []
        self._queue.remove(request)
        self.queued -= request.waiting
        for index in range(request.admitted, request.params.n):
            request.results[index] = result
        request.admitted = request.params.n
        return self._completed(request)

    @property
    def active(self) -> list[LiveCompletion]:
        """All completions that have a slot."""
        return self.running + self.prefilling

    @property
    def can_admit(self) -> bool:
        return bool(self._queue and self._free_slots)

    def holds_back(self, request: Request) -> bool:
        """Return True if a completion of the request waits for its slot or its prefill: work on others helps it."""
        return bool(request.waiting) or any(completion in self.prefilling for completion in request.running)

    def find(self, rid: str) -> Request | None:
        return self._by_rid.get(rid)

    def requests(self) -> list[Request]:
        """Return all requests in progress."""
        return list(self._by_rid.values())

    def arrange(self) -> Layout:
        """Give every running completion its row for the next steps.

        Returns the moves of cached rows, which the caller must make, and the groups.
        """
        current = np.fromiter((c.row for c in self.running), np.int64, len(self.running))
        lengths = np.fromiter((c.length for c in self.running), np.int64, len(self.running))
        layout = self._planner.plan(current, lengths)
        for completion, row in zip(self.running, layout.rows.tolist(), strict=True):
            completion.row = row
        self.running.sort(key=lambda c: c.row)
        return layout

    def _completed(self, request: Request) -> list[Request]:
        if len(request.results) < request.params.n:
            return []
        return [self._by_rid.pop(request.rid)]


# ---- rows grouped by length


@dataclass(slots=True)
class RowGroup:
    """Rows start..stop-1; the longest has ``length`` positions, and all have if ``equal``.

    ``length`` grows by one with every step.
    """

    start: int
    stop: int
    length: int
    equal: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """Plan of rows: rows[i] is the row of the i-th completion.

    Rows ``sources`` of the cache move to ``targets`` together: a target may be the source of another
    move. The first ``moved_length`` positions of each are valid or stale, never more.
    """

    rows: I64
    sources: I64
    targets: I64
    moved_length: int
    groups: list[RowGroup]


@dataclass(frozen=True, slots=True)
class LayoutPlanner:
    """Planner of rows and groups. ``overhead``: positions whose reading costs as much as one more group."""

    overhead: int

    def plan(self, current: I64, lengths: I64) -> Layout:
        """Plan rows for completions of ``lengths``, now in rows ``current`` (-1: not cached yet).

        Either keeps the rows and only fills the holes, or sorts by length if that saves more reading over
        the next steps than the moves cost.
        """
        keep = self._keep(current, lengths)
        tidy = self._tidy(current, lengths)
        gain = (self._cost(keep.groups) - self._cost(tidy.groups)) * _HORIZON
        price = _MOVE_COST * (_moved(keep, lengths) - _moved(tidy, lengths))
        return tidy if gain + price > 0 else keep

    def _keep(self, current: I64, lengths: I64) -> Layout:
        """Keep the completions in rows 0..n-1; give the others, longest first, the free rows."""
        # Rows n and above must move even here: a step works on the slice 0..n-1.
        stays = (current >= 0) & (current < len(current))
        rows = np.where(stays, current, -1)
        # in order, to the completions without a row, longest first
        without_row = np.flatnonzero(rows < 0)
        rows[without_row[np.argsort(-lengths[without_row], kind="stable")]] = np.setdiff1d(
            np.arange(len(rows)), current[stays]
        )
        return self._layout(current, lengths, rows)

    def _tidy(self, current: I64, lengths: I64) -> Layout:
        """Group as if sorted by length; keep the completions whose row is within their group's range."""
        order = np.argsort(-lengths, kind="stable")
        rows = np.full(len(current), -1)
        for start, stop in self.split(lengths[order]):
            members = order[start:stop]
            # The order within a group does not matter, so a completion in its range saves a move.
            stays = members[(current[members] >= start) & (current[members] < stop)]
            rows[stays] = current[stays]
            free = np.setdiff1d(np.arange(start, stop), current[stays])
            rows[members[rows[members] < 0]] = free
        return self._layout(current, lengths, rows)

    def _layout(self, current: I64, lengths: I64, rows: I64) -> Layout:
        moving = (current >= 0) & (current != rows)
        by_row = np.empty(len(rows), np.int64)
        by_row[rows] = lengths
        groups = []
        for start, stop in self.split(by_row):
            longest = int(by_row[start:stop].max())
            groups.append(RowGroup(start, stop, longest, longest == int(by_row[start:stop].min())))
        moved_length = int(lengths[moving].max()) if moving.any() else 0
        return Layout(rows, current[moving], rows[moving], moved_length, groups)

    def _cost(self, groups: list[RowGroup]) -> int:
        return sum((group.stop - group.start) * group.length + self.overhead for group in groups)

    def split(self, lengths: I64) -> list[tuple[int, int]]:
        """Cut rows, in this order, into ranges while a cut saves more than one more group costs."""
        ranges: list[tuple[int, int]] = []
        todo = [(0, len(lengths))] if len(lengths) else []
        while todo:
            start, stop = todo.pop()
            part = lengths[start:stop]
            cut = self._best_cut(part) if len(ranges) + len(todo) + 1 < _MAX_GROUPS else 0
            if cut:
                todo += [(start + cut, stop), (start, start + cut)]
            else:
                ranges.append((start, stop))
        return ranges

    def _best_cut(self, part: I64) -> int:
        """Return how many rows the first of two ranges should have; 0 if no cut is worth it."""
        if len(part) < 2:
            return 0
        # left[i], right[i]: longest row of either range if the first has i + 1 rows.
        left = np.maximum.accumulate(part)[:-1]
        right = np.maximum.accumulate(part[::-1])[::-1][1:]
        counts = np.arange(1, len(part))
        costs = counts * left + (len(part) - counts) * right
        best = int(costs.argmin())
        whole = len(part) * int(part.max())
        return best + 1 if whole - int(costs[best]) > self.overhead else 0


def _moved(layout: Layout, lengths: I64) -> int:
    """Return the number of positions that a layout copies."""
    return layout.moved_length * len(layout.sources)
