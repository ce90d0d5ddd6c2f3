"""The requests of one server: held back, under way in SGLang, interrupted, finished. On one event loop, no locks.

serve ──> [held?] ──> trip to SGLang ──> all answers finished? ──no──> [held?] ──> ...
             │ abort: ends with what it has      └──yes──> results
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable

from realsys.errors import GenerationError
from realsys.generation.backend import Completion
from realsys.generation.protocol import UNSYNCED
from realsys.generation.sglang.keeper import Run
from realsys.generation.sglang.requests import Request

_RECALL_INTERVAL_S = 0.25
_RECALL_TIMEOUT_S = 60.0


class Traffic:
    """Owns what is under way. ``version``, ``path``: of the weights that SGLang has now, "" for those it was started
    with. ``holds``: why new trips wait.
    """

    def __init__(self, max_answers: int, request_timeout_s: float) -> None:
        self._max_answers, self._request_timeout_s = max_answers, request_timeout_s
        self._requests: dict[str, Request] = {}
        self._serials = itertools.count()
        self.run: Run | None = None
        self.failure: str | None = "SGLang is starting"  # why there is no run
        self.version, self.path = UNSYNCED, ""
        self.holds: set[str] = set()
        self.tokens = 0  # handed over
        self._busy_s, self._busy_since = 0.0, 0.0

    # ---- the run

    def up(self, run: Run) -> None:
        """SGLang serves, with the weights that it was started with."""
        self.run, self.failure, self.version, self.path = run, None, UNSYNCED, ""

    def down(self, reason: str) -> None:
        """It does not. What is under way fails by itself, with its connection; what is held back fails here."""
        self.run, self.failure, self.version, self.path = None, reason, UNSYNCED, ""
        for request in self._requests.values():
            if request.go is not None and not request.go.done():
                request.go.set_exception(self._unserved())

    def serving(self) -> Run:
        """The run. Raises GenerationError when there is none."""
        if self.run is None:
            raise self._unserved()
        return self.run

    # ---- requests

    async def serve(self, request: Request) -> list[Completion]:
        """Its answers. Raises GenerationError: it cannot be taken, or SGLang refused or lost it."""
        self.serving()
        if request.rid in self._requests:
            raise GenerationError(f"rid={request.rid!r} is the id of a request in progress; ids must be unique")
        waiting, wanted = sum(len(r.open) for r in self._requests.values()), request.params.n
        if waiting + wanted > self._max_answers:
            raise GenerationError(
                f"queue full: {waiting} answers are open and {wanted} more were asked for, "
                f"max_answers={self._max_answers}; try again later or another server",
                retryable=True,
            )
        self._requests[request.rid] = request
        try:
            while request.open and not request.aborted:
                if self.holds:
                    request.go = asyncio.get_running_loop().create_future()
                    await request.go
                else:
                    await self._trip(request)
            results = request.results()
        finally:
            del self._requests[request.rid]
        self.tokens += sum(len(result.tokens) for result in results)
        return results

    async def _trip(self, request: Request) -> None:
        run, version = self.serving(), self.version
        request.recalled = False
        pieces = request.pieces(self._serials)
        if not self.under_way():
            self._busy_since = time.perf_counter()
        request.trip = asyncio.ensure_future(run.api.generate(pieces, self._request_timeout_s))
        try:
            replies = await request.trip
        finally:
            request.trip = None
            if not self.under_way():
                self._busy_s += time.perf_counter() - self._busy_since
        # Where SGLang does not say: while a trip is under way the version cannot change (Updater).
        request.take(replies, None if run.reports else version)

    def hold(self, why: str) -> None:
        """Start no trip until ``release`` was called for every hold."""
        self.holds.add(why)

    def release(self, why: str) -> None:
        self.holds.discard(why)
        if not self.holds:
            for request in self._requests.values():
                if request.go is not None and not request.go.done():
                    request.go.set_result(None)

    def under_way(self) -> list[Request]:
        return [request for request in self._requests.values() if request.trip is not None]

    # ---- interruption

    def abort(self, rid: str | None = None) -> list[Request]:
        """Mark one request, or all, to end with what it has. Returns those that SGLang must be asked to give back."""
        chosen = [r for r in self._requests.values() if rid is None or r.rid == rid]
        for request in chosen:
            request.aborted = True
            if request.go is not None and not request.go.done():
                request.go.set_result(None)
        return [request for request in chosen if request.trip is not None]

    def __contains__(self, rid: str) -> bool:
        return rid in self._requests

    async def recall(self, requests: Iterable[Request]) -> None:
        """Have SGLang end what it does for these, and return when it has. Those not aborted go on when not held.

        SGLang forgets an abort for a request that it has not read yet, so it is asked again. Raises GenerationError
        when it does not give them back in time.
        """
        trips = {request.trip: request for request in requests if request.trip is not None}
        for request in trips.values():
            request.recalled = True
        deadline = time.monotonic() + _RECALL_TIMEOUT_S
        while left := {trip for trip in trips if not trip.done()}:
            if time.monotonic() > deadline:
                raise GenerationError(f"SGLang did not end {len(left)} requests within {_RECALL_TIMEOUT_S:g} s")
            api = self.serving().api
            if len(left) == len(self.under_way()):
                await api.abort_all()
            else:
                await api.abort([rid for trip in left for rid in trips[trip].rids])
            await asyncio.wait(left, timeout=_RECALL_INTERVAL_S)

    async def drained(self, timeout_s: float) -> None:
        """Return when nothing is under way. Raises GenerationError when that takes too long."""
        trips = {request.trip for request in self.under_way() if request.trip is not None}
        if not trips:
            return
        _, left = await asyncio.wait(trips, timeout=timeout_s)
        if left:
            raise GenerationError(f"{len(left)} running requests did not end within {timeout_s:g} s", retryable=True)

    # ---- counters

    def open_answers(self) -> tuple[int, int]:
        """Answers in SGLang, and held back."""
        running = sum(len(request.open) for request in self.under_way())
        return running, sum(len(request.open) for request in self._requests.values()) - running

    def busy_s(self) -> float:
        """Seconds in which something was under way."""
        return self._busy_s + (time.perf_counter() - self._busy_since if self.under_way() else 0.0)

    def _unserved(self) -> GenerationError:
        return GenerationError(self.failure or "SGLang does not serve", retryable=True)
