"""Who decodes where: admission queue, slots, rows and length groups. Pure bookkeeping, no torch.

    submit ──> queue ──admit──> prefilling (has a slot) ──join──> running (and a full row of the KV cache) ──finish──>
                                    ^──────────────── suspend ────────────────┘

A *slot* is where an answer's tokens, log-probs and random numbers stay for its whole life. A *row* is its place in the
KV cache; rows 0..n-1 are always the running answers, so that a step works on slices, and ``arrange`` moves answers
between rows to keep similar lengths together. Answers of one request are admitted one by one as slots get free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from realsys.errors import GenerationError
from realsys.generation.backend import Completion
from realsys.generation.embedded.layout import Layout, LayoutPlanner, RowGroup
from realsys.generation.protocol import SamplingParams
from realsys.types import I32

__all__ = ["Answer", "Layout", "Request", "RowGroup", "Scheduler"]


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and the answers asked for. ``stops`` are its stop tokens with the model's own."""

    rid: str
    prompt: I32
    params: SamplingParams
    seed: int
    stops: tuple[int, ...]
    done: Future[list[Completion]]
    admitted: int = 0  # answers taken from the queue so far
    running: list[Answer] = field(default_factory=list)
    results: dict[int, Completion] = field(default_factory=dict)
    key: bytes = field(init=False)  # sorts requests by prompt

    def __post_init__(self) -> None:
        self.key = self.prompt.astype(">i4").tobytes()

    @property
    def waiting(self) -> int:
        return self.params.n - self.admitted


@dataclass(slots=True, eq=False)
class Answer:
    """One admitted answer. ``length`` counts prompt and answer tokens; the last of them is never in the cache.

    ``cached`` positions of its row are good while it is prefilling; when it runs, all but the last are.
    """

    request: Request
    index: int
    slot: int
    length: int
    row: int = -1  # -1: nothing in the KV cache yet
    cached: int = 0
    segments: list[tuple[int, int]] = field(default_factory=list)

    @property
    def generated(self) -> int:
        return self.length - len(self.request.prompt)

    @property
    def answer_start(self) -> int:
        """Position of the answer's first token; before the end of the prompt when an earlier request began it."""
        return len(self.request.prompt) - self.request.params.answer_prefix

    @property
    def ban_length(self) -> int:
        """Length below which stop tokens must not be drawn."""
        return len(self.request.prompt) + self.request.params.min_new_tokens

    @property
    def limit(self) -> int:
        """Length at which the answer is cut."""
        return len(self.request.prompt) + self.request.params.max_new_tokens

    def close_segment(self, version: int) -> None:
        """Attribute the tokens since the last segment to ``version``."""
        count = self.generated - sum(count for _, count in self.segments)
        if count:
            self.segments.append((version, count))


class Scheduler:
    """Owns slots, queue and the line of those to be prefilled. ``running`` is in row order after ``arrange``."""

    def __init__(self, max_running: int, max_queued: int, planner: LayoutPlanner) -> None:
        self.max_running, self.max_queued = max_running, max_queued
        self.running: list[Answer] = []
        self.prefilling: list[Answer] = []
        self.queued = 0  # answers
        self._planner = planner
        self._queue: deque[Request] = deque()
        self._free_slots = list(range(max_running - 1, -1, -1))
        self._by_rid: dict[str, Request] = {}

    def submit(self, request: Request) -> None:
        """Queue a request. Raises GenerationError when the queue is full or the id is in use."""
        if request.rid in self._by_rid:
            raise GenerationError(f"rid={request.rid!r} is the id of a request in progress; ids must be unique")
        count = request.params.n
        if self.queued + count > self.max_queued + len(self._free_slots):
            raise GenerationError(
                f"queue full: {self.queued} answers wait and {count} more were asked for, "
                f"max_queued={self.max_queued}; try again later or another server",
                retryable=True,
            )
        self._by_rid[request.rid] = request
        self._queue.append(request)
        self.queued += count

    def admit(self) -> list[Answer]:
        """Give free slots to queued answers, first come first served."""
        admitted: list[Answer] = []
        while self._queue and self._free_slots:
            request = self._queue[0]
            answer = Answer(request, request.admitted, self._free_slots.pop(), len(request.prompt))
            request.admitted += 1
            request.running.append(answer)
            admitted.append(answer)
            self.queued -= 1
            if not request.waiting:
                self._queue.popleft()
        self.prefilling += admitted
        return admitted

    def join(self, answers: Sequence[Answer]) -> None:
        """Let prefilled answers run. Call ``arrange`` before the next step."""
        gone = {id(answer) for answer in answers}
        self.prefilling = [answer for answer in self.prefilling if id(answer) not in gone]
        self.running += answers

    def suspend(self) -> None:
        """Send all running answers back to be prefilled: nothing that is cached is good any more."""
        for answer in self.active:
            answer.row, answer.cached = -1, 0
        # Short ones first: most answers are back soonest. New ones have waited less.
        self.prefilling = sorted(self.running, key=lambda answer: answer.length) + self.prefilling
        self.running = []

    def finish(self, ended: Sequence[tuple[Answer, Completion]]) -> list[Request]:
        """Free the slots of admitted answers. Returns the requests that are complete with them."""
        gone = {id(answer) for answer, _ in ended}
        self.running = [answer for answer in self.running if id(answer) not in gone]
        self.prefilling = [answer for answer in self.prefilling if id(answer) not in gone]
        complete = []
        for answer, result in ended:
            self._free_slots.append(answer.slot)
            request = answer.request
            request.running.remove(answer)
            request.results[answer.index] = result
            complete += self._completed(request)
        return complete

    def drop_waiting(self, request: Request, result: Completion) -> list[Request]:
        """End the answers of a request that wait for a slot, each with ``result``. Returns it if it is complete."""
        if not request.waiting:
            return []
        self._queue.remove(request)
        self.queued -= request.waiting
        for index in range(request.admitted, request.params.n):
            request.results[index] = result
        request.admitted = request.params.n
        return self._completed(request)

    @property
    def active(self) -> list[Answer]:
        """All answers that have a slot."""
        return self.running + self.prefilling

    @property
    def can_admit(self) -> bool:
        return bool(self._queue and self._free_slots)

    def find(self, rid: str) -> Request | None:
        return self._by_rid.get(rid)

    def requests(self) -> list[Request]:
        """All requests in progress."""
        return list(self._by_rid.values())

    def arrange(self) -> Layout:
        """Give every running answer its row for the next steps; returns the moves of cached rows and the groups."""
        current = np.fromiter((a.row for a in self.running), np.int64, len(self.running))
        lengths = np.fromiter((a.length for a in self.running), np.int64, len(self.running))
        layout = self._planner.plan(current, lengths)
        for answer, row in zip(self.running, layout.rows.tolist(), strict=True):
            answer.row = row
        self.running.sort(key=lambda a: a.row)
        return layout

    def _completed(self, request: Request) -> list[Request]:
        if len(request.results) < request.params.n:
            return []
        return [self._by_rid.pop(request.rid)]
