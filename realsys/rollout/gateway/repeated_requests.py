"""Repeats of requests, and whether the agent has a completion. Pure: time is an argument, and there is no I/O.

    begin ──> running ──complete──> ready ──sent──> received ──┐ window
                 │ last connection breaks  │                    ├──> forgotten
                 └──────> abandoned <──────┘ ───── window ──────┘
                              └──begin of a repeat──> as before

Rules
one-completion    A repeat gets the completion of the earlier request. A request repeats an earlier one with the same
                  body if both have the same Idempotency-Key, if it is marked as a retry, or if the earlier one is
                  abandoned: its connection broke.
no-false-repeat   Every other request is new, also with the same body: an agent may want two samples. A retry that
                  an error reply asked for is new, too.
bounded           An entry without a connection is forgotten at the end of its window, or when too many are kept.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

MOST_RECEIVED = 64  # completions that are kept for late retries


@dataclass(slots=True)
class RequestEntry:
    """One request and its repeats.

    key          value of its Idempotency-Key; "" without one
    connections  requests that wait for the completion
    received     the whole reply was sent on a connection that was open
    """

    number: int
    digest: bytes
    key: str
    connections: int = 1
    complete: bool = False
    received: bool = False


class Requests:
    """The requests of one episode."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._entries: dict[int, RequestEntry] = {}
        self._by_digest: dict[bytes, list[RequestEntry]] = {}
        self._by_key: dict[str, RequestEntry] = {}
        self._idle: dict[int, float] = {}  # entries without a connection -> end of their window, in order of time
        self._failed: Counter[bytes] = Counter()  # digest -> error replies whose retry is still to come
        self.begun = 0
        self.repeats = 0

    @property
    def waiting(self) -> int:
        """Number of connections that wait for a reply."""
        return sum(entry.connections for entry in self._entries.values())

    def begin(self, digest: bytes, key: str, retry: bool) -> tuple[RequestEntry, bool]:
        """Add a request. Return its entry, and True if it is new.

        ``retry``: the client marked the request as a retry. Raises ValueError if ``key`` belongs to another body.
        """
        entry = self._repeated(digest, key, retry)
        if entry is not None:
            entry.connections += 1
            self._idle.pop(entry.number, None)
            self.repeats += 1
            return entry, False
        entry = RequestEntry(self.begun, digest, key)
        self.begun += 1
        self._entries[entry.number] = entry
        self._by_digest.setdefault(digest, []).append(entry)
        if key:
            self._by_key[key] = entry
        return entry, True

    def complete(self, entry: RequestEntry) -> None:
        """Note that the completion exists."""
        entry.complete = True

    def sent(self, entry: RequestEntry, now: float) -> bool:
        """Note that the reply was sent to an open connection. Return True the first time."""
        first, entry.received = not entry.received, True
        self._leave(entry, now)
        return first

    def broken(self, entry: RequestEntry, now: float) -> None:
        """Note that a connection broke before it had the whole reply."""
        self._leave(entry, now)

    def fail(self, entry: RequestEntry, retry: bool) -> None:
        """Forget a request that gets an error. ``retry``: the reply asks each of its connections for a retry."""
        if entry.number in self._entries:
            if retry:
                self._failed[entry.digest] += entry.connections
            self._forget(entry)

    def due(self, now: float) -> list[RequestEntry]:
        """Forget the entries whose window has ended, and return them."""
        ended: list[RequestEntry] = []
        for number, end in self._idle.items():
            if end > now and len(self._idle) - len(ended) <= MOST_RECEIVED:
                break
            ended.append(self._entries[number])
        for entry in ended:
            self._forget(entry)
        return ended

    def next_end(self) -> float | None:
        """Return the time at which ``due`` will have an entry; None: never."""
        return next(iter(self._idle.values()), None)

    def _repeated(self, digest: bytes, key: str, retry: bool) -> RequestEntry | None:
        if key and (known := self._by_key.get(key)) is not None:
            if known.digest != digest:
                raise ValueError(f"Idempotency-Key {key!r} belongs to a request with another body: use another key")
            return known
        earlier = [entry for entry in self._by_digest.get(digest, ()) if entry.key == key]
        failed = self._failed.pop(digest, 0)  # a request that is no retry: its client retries no earlier one
        if retry and failed:
            if failed > 1:
                self._failed[digest] = failed - 1
            return None
        abandoned = next((entry for entry in earlier if not entry.connections and not entry.received), None)
        if abandoned is not None or not retry:
            return abandoned
        # This machine may not know yet that a connection broke. The oldest request is the most likely one.
        waiting = (entry for entry in earlier if not entry.received)
        return next(waiting, earlier[-1] if earlier else None)

    def _leave(self, entry: RequestEntry, now: float) -> None:
        entry.connections -= 1
        if not entry.connections and entry.number in self._entries:
            self._idle[entry.number] = now + self._window_s

    def _forget(self, entry: RequestEntry) -> None:
        del self._entries[entry.number]
        self._idle.pop(entry.number, None)
        same = self._by_digest[entry.digest]
        same.remove(entry)
        if not same:
            del self._by_digest[entry.digest]
        if entry.key:
            self._by_key.pop(entry.key, None)
