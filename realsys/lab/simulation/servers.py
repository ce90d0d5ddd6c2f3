"""Cost model of a generation server: completions share its rate, and time advances only where the rate changes.

    submit ──> running (a heap by the work at which a piece ends) ──> piece done ──> request done
                  ^ queue, if max_running are running

All running completions progress equally. ``work`` is the number of tokens that each of them has sampled since the start
of the server, so a piece of k tokens that starts at work w ends at w + k, at whatever rate. No event per token.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from realsys.lab.simulation.clock import Clock
from realsys.lab.simulation.scenarios import HostSettings, ServerSettings
from realsys.types import PublishedVersion

_EPSILON = 1e-6  # tokens
_RESOLUTION = 1e-9  # seconds; work that is due within this time is done, because the clock cannot advance by less


@dataclass(slots=True)
class DecodePiece:
    """A request's part for one completion: ``tokens`` to sample. ``began``: work at its first token."""

    index: int  # number of the completion in its group
    tokens: int
    began: float = -1.0


@dataclass(slots=True)
class EngineRequest:
    """Pieces of one group on one server. ``moved`` is called when pieces have ended; none is ``left`` in the end."""

    pieces: list[DecodePiece]
    prefill_tokens: int
    moved: Callable[[EngineRequest], None]
    left: int = 0
    #: (piece, version -> tokens) of the pieces that have ended
    sampled: list[tuple[DecodePiece, dict[int, int]]] = field(default_factory=list)


class SimulatedEngine:
    """One incarnation of a server."""

    def __init__(
        self, clock: Clock, settings: ServerSettings, host: Host | None = None, *, asleep: bool = False
    ) -> None:
        self.clock = clock
        self.settings = settings
        self.host = host or Host(HostSettings())
        self.serving: PublishedVersion | None = None
        self.up = True
        self._running: list[tuple[float, int, DecodePiece, EngineRequest]] = []
        self._queue: deque[tuple[DecodePiece, EngineRequest]] = deque()
        self._requests: dict[int, EngineRequest] = {}
        self._work = 0.0
        self._since = 0.0
        self._rate = 0.0
        self._paused = False
        self._armed = -1.0
        self._number = 0
        self._swaps: list[tuple[float, int]] = []  # (work, version)
        self._before = 0.0  # sum of ``_before`` over the running pieces
        self._recompute: HostJob | None = None  # of the cache, while it is computed again
        self.asleep = asleep
        self._sleeps = asleep  # what the last order said
        self._shifted_at = 0.0  # end of that order
        self._emptied = asleep  # the cache went with the memory

    def submit(self, request: EngineRequest) -> None:
        """Start the pieces of a request."""
        self._advance()
        request.left = len(request.pieces)
        self._requests[id(request)] = request
        for piece in request.pieces:
            self._queue.append((piece, request))
        self._fill()

    def cancel(self, request: EngineRequest) -> int:
        """Stop a request. Returns the tokens that its unfinished pieces have sampled."""
        if self._requests.pop(id(request), None) is None:
            return 0
        self._advance()
        lost = sum(self._so_far(piece) for _, _, piece, owner in self._running if owner is request)
        self._running = [entry for entry in self._running if entry[3] is not request]
        heapq.heapify(self._running)
        self._before = sum(_before(piece, owner) for _, _, piece, owner in self._running)
        self._queue = deque(entry for entry in self._queue if entry[1] is not request)
        self._fill()
        return lost

    def die(self) -> dict[int, int]:
        """Stop for good; every request fails. Returns id of the request -> tokens that are lost with it."""
        self._advance()
        lost = dict.fromkeys(self._requests, 0)
        for _, _, piece, owner in self._running:
            lost[id(owner)] += self._so_far(piece)
        self.up = False
        self._running.clear()
        self._queue.clear()
        self._set_rate()
        if self._recompute is not None:
            self._recompute.cancel()
        return lost

    def load(self) -> tuple[int, int]:
        """Return (completions that run or queue, tokens in the cache)."""
        return len(self._running) + len(self._queue), self._cached()

    def requests(self) -> list[EngineRequest]:
        return list(self._requests.values())

    def swap(self, target: PublishedVersion, done: Callable[[], None]) -> None:
        """Pause, load ``target``, compute the cache again and continue; then call ``done``."""
        self._paused = True
        self._advance()
        self._set_rate()
        self.clock.after(self.settings.swap_s, self._loaded, target, done)

    def shift(self, sleeps: bool, done: Callable[[], None]) -> None:
        """Release the memory, or take it again, after the order before; then call ``done``.

        Requests wait with the tokens that they have, until the swap after the wake.
        """
        self._paused = self._paused or sleeps
        self._advance()
        self._set_rate()
        seconds = self.settings.sleep_s if sleeps else self.settings.wake_s
        begin = max(self.clock.now, self._shifted_at)
        self._shifted_at = begin + (seconds if sleeps != self._sleeps else 0.0)
        self._sleeps = sleeps
        self.clock.at(self._shifted_at, self._shifted, sleeps, done)

    def _shifted(self, sleeps: bool, done: Callable[[], None]) -> None:
        if self.up:
            self.asleep = sleeps
            if sleeps:
                self._paused = self._emptied = True  # a manager before this one may have swapped meanwhile
                self.serving = None
                self._advance()
                self._set_rate()
                if self._recompute is not None:
                    self._recompute.cancel()
        done()

    def _loaded(self, target: PublishedVersion, done: Callable[[], None]) -> None:
        if not self.up or self.asleep:
            return
        rate, swapped = self.settings.recompute_tokens_per_s, partial(self._swapped, target, done)
        if self._emptied:
            rate = rate or self.settings.prefill_tokens_per_s
        if not rate:
            swapped()
        else:
            cores = self.host.settings.server_cores
            self._recompute = HostJob(self.clock, self.host, cores, self._cached() / rate, swapped)

    def _cached(self) -> int:
        work = self._work + self._rate * (self.clock.now - self._since)
        return max(0, int(self._before + len(self._running) * work))

    def _swapped(self, target: PublishedVersion, done: Callable[[], None]) -> None:
        self._recompute = None
        self._advance()
        self._paused = self._emptied = False
        self.serving = target
        self._swaps.append((self._work, target.version))
        self._fill()
        done()

    def _advance(self) -> None:
        self._work += self._rate * (self.clock.now - self._since)
        self._since = self.clock.now

    def _fill(self) -> None:
        """Start queued pieces while there is room, and set the rate."""
        settings = self.settings
        while self._queue and len(self._running) < settings.max_running:
            piece, request = self._queue.popleft()
            # A prefill delays the first token: it counts as the tokens that the completion would have sampled.
            wait = request.prefill_tokens / settings.prefill_tokens_per_s * settings.tokens_per_s
            piece.began = self._work + wait
            self._number += 1
            self._before += _before(piece, request)
            heapq.heappush(self._running, (piece.began + piece.tokens, self._number, piece, request))
        self._set_rate()

    def set_speed(self) -> None:
        """Continue at the host's new speed."""
        self._advance()
        self._set_rate()

    def _set_rate(self) -> None:
        count, settings, host = len(self._running), self.settings, self.host
        if self._paused or not count:
            self._rate = 0.0
            host.use(self, 0.0)
            return
        alone = 1.0 / (1.0 / settings.tokens_per_s + count * settings.s_per_completion)
        alone = min(alone, settings.total_tokens_per_s / count)
        host.use(self, host.settings.server_cores + host.settings.cpu_s_per_token * alone * count)
        self._rate = alone * host.speed
        due = self.clock.now + max(0.0, self._running[0][0] - self._work) / self._rate
        if self._armed < 0 or due < self._armed:
            self._armed = due
            self.clock.at(due, self._fire, due)

    def _fire(self, due: float) -> None:
        if due != self._armed or not self.up:
            return  # an earlier event took its place
        self._armed = -1.0
        self._advance()
        moved: dict[int, EngineRequest] = {}
        over = self._work + max(_EPSILON, self._rate * _RESOLUTION)
        while self._running and self._running[0][0] <= over:
            _, _, piece, request = heapq.heappop(self._running)
            self._before -= _before(piece, request)
            counts: dict[int, int] = {}
            left = piece.tokens
            for work, version in reversed(self._swaps):
                since = max(0, int(work - piece.began))  # tokens before this version
                if since < left:
                    counts[version] = counts.get(version, 0) + left - since
                    left = since
                if not left:
                    break
            assert not left, "a server without weights has sampled"
            request.sampled.append((piece, counts))
            request.left -= 1
            moved[id(request)] = request
            if not request.left:
                del self._requests[id(request)]
        self._fill()
        for request in moved.values():
            request.moved(request)

    def _so_far(self, piece: DecodePiece) -> int:
        return max(0, min(piece.tokens, int(self._work - piece.began)))


def _before(piece: DecodePiece, request: EngineRequest) -> float:
    """Return the tokens that a piece found in the cache, minus the work at its start."""
    return request.prefill_tokens / len(request.pieces) - piece.began


# ---- cost model of a host: processes that compute share its cores, and each slows the others down
#
#     process computes ──use(cores)──> Host ──speed──> every process that computes
#
# Each process gets the same share of the cores that it wants: speed = cores / (wanted cores), at most 1.


class HostProcess(Protocol):
    """A process whose work takes longer while others compute."""

    def set_speed(self) -> None:
        """Continue at the host's new ``speed``."""
        ...


class Host:
    """Cores of one host. ``speed`` is that of every process that computes, over its speed alone."""

    def __init__(self, settings: HostSettings) -> None:
        self.settings = settings
        self.speed = 1.0
        self._wanted: dict[HostProcess, float] = {}

    def use(self, process: HostProcess, cores: float) -> None:
        """Let ``process`` compute on ``cores`` from now on; 0: it waits. The speed of all follows."""
        if not self.settings.cores:
            return
        if cores:
            self._wanted[process] = cores
        else:
            self._wanted.pop(process, None)
        wanted = sum(self._wanted.values())
        speed = min(1.0, self.settings.cores / wanted) if wanted else 1.0
        if speed != self.speed:
            self.speed = speed
            for other in list(self._wanted):
                if other is not process:
                    other.set_speed()


class HostJob:
    """Work of ``seconds`` on ``cores`` of a host, which calls ``done`` at its end."""

    def __init__(self, clock: Clock, host: Host, cores: float, seconds: float, done: Callable[[], None]) -> None:
        self._clock = clock
        self._host = host
        self._left = seconds
        self._done = done
        self._number = 0  # plans of its end: only the last one counts
        self._since = clock.now
        self._speed = 1.0
        host.use(self, cores)
        self.set_speed()

    def set_speed(self) -> None:
        """Plan the end of the work at the host's speed."""
        now = self._clock.now
        self._left = max(0.0, self._left - self._speed * (now - self._since))
        self._since, self._speed = now, self._host.speed
        self._number += 1
        self._clock.after(self._left / self._speed, self._end, self._number)

    def cancel(self) -> None:
        """Stop without calling ``done``."""
        self._number += 1
        self._host.use(self, 0.0)

    def _end(self, number: int) -> None:
        if number == self._number:
            self.cancel()
            self._done()
