"""Health of a server, and the reports that make the manager ask it. Pure: time is an argument.

Rules (``blame-needs-evidence``):

- A report never removes a server. It makes the manager probe the server; until the reply, only the worker that
  reported it is sent elsewhere.
- A server is quarantined if a probe fails, or if several workers report it within a window.
- A quarantined server is probed again, with back-off, and returns with the first reply.
- A worker that reports many servers that then reply is a suspect: its reports are ignored until the window has passed.

    healthy ──reported, update_failed──> suspected ──silent, accused──> quarantined
       ^                                     │                               │
       └──────────── answered, updated ──────┴───────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

HealthState = Literal["healthy", "suspected", "quarantined"]
#: reported: by one worker. accused: by several. silent, answered: result of a probe. updated: it has verified a version
HealthEvent = Literal["reported", "accused", "update_failed", "silent", "answered", "updated"]
#: ignored: the report of a suspect
Verdict = Literal["ignored", "reported", "accused"]

TRANSITIONS: Mapping[tuple[HealthState, HealthEvent], HealthState] = {
    ("healthy", "reported"): "suspected",
    ("healthy", "accused"): "quarantined",
    ("healthy", "update_failed"): "suspected",
    ("healthy", "updated"): "healthy",
    ("suspected", "reported"): "suspected",
    ("suspected", "accused"): "quarantined",
    ("suspected", "update_failed"): "suspected",
    ("suspected", "updated"): "healthy",
    ("suspected", "answered"): "healthy",
    ("suspected", "silent"): "quarantined",
    ("quarantined", "update_failed"): "quarantined",
    ("quarantined", "updated"): "healthy",
    ("quarantined", "answered"): "healthy",
    ("quarantined", "silent"): "quarantined",
}

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.5, 30.0


def backoff_s(failures: int) -> float:
    """Return the delay after one more failure than ``failures`` in a row: it doubles up to LAST_BACKOFF_S."""
    return float(min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(failures, 16)))


@dataclass(slots=True)
class Health:
    """Health of one server.

    serial    grows with each change of state: the result of a probe that began before it is ignored
    epoch     grows when the server leaves quarantine: reports about calls from before it are ignored
    strikes   quarantines and silent probes since the last update that succeeded; they double the back-off
    probe_at  time of the next probe of a suspected or quarantined server
    """

    server: str
    state: HealthState = "healthy"
    serial: int = 0
    epoch: int = 0
    strikes: int = 0
    probe_at: float = 0.0

    def apply(self, event: HealthEvent, now: float = 0.0) -> None:
        """Take the transition of ``event``. Raises ValueError for an event that this state does not know."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise ValueError(f"server {self.server}: event {event!r} is not possible while it is {self.state}")
        before, self.state = self.state, after
        self.serial += after != before
        self.epoch += before == "quarantined" and after == "healthy"
        if event in ("accused", "silent"):
            self.probe_at = now + backoff_s(self.strikes)
            self.strikes += 1
        elif before == "healthy" and after == "suspected":
            self.probe_at = now
        elif event == "updated":
            self.strikes = 0


@dataclass(frozen=True, slots=True)
class BlameRules:
    """Settings of the evidence.

    window_s   seconds for which a report counts
    reporters  workers whose reports quarantine a server without a probe
    wrong      servers that a worker may report wrongly in the window before it is a suspect
    """

    window_s: float = 30.0
    reporters: int = 2
    wrong: int = 3


@dataclass(slots=True)
class _Report:
    """Last report of a worker about a server. ``wrong``: the server has replied to a probe since."""

    time: float
    wrong: bool = False


class Reports:
    """Reports within the window, by worker and server."""

    def __init__(self, rules: BlameRules) -> None:
        self._rules = rules
        self._by_worker: dict[str, dict[str, _Report]] = {}
        self.ignored = 0  # reports of suspects, since the start

    def __len__(self) -> int:
        return sum(map(len, self._by_worker.values()))

    def add(self, worker: str, server: str, now: float) -> Verdict:
        """Count a report, and return the verdict."""
        self._expire(now)
        if self._is_suspect(worker):
            self.ignored += 1
            return "ignored"
        self._by_worker.setdefault(worker, {})[server] = _Report(now)
        # A worker that reports more servers than this is about to be a suspect: only probes can prove it right.
        credible = [rows for rows in self._by_worker.values() if server in rows and len(rows) <= self._rules.wrong]
        if len(credible) < self._rules.reporters:
            return "reported"
        self.discard(server)
        return "accused"

    def answered(self, server: str, now: float) -> list[str]:
        """Mark the reports about a server that replied as wrong. Returns the workers that are suspects since."""
        self._expire(now)
        suspects = []
        for worker, rows in self._by_worker.items():
            if server in rows and not rows[server].wrong:
                rows[server].wrong = True
                suspects += [worker] if sum(row.wrong for row in rows.values()) == self._rules.wrong else []
        return suspects

    def discard(self, server: str) -> None:
        """Forget the reports about a server: they were right, or it is gone."""
        for worker in list(self._by_worker):
            self._by_worker[worker].pop(server, None)
            if not self._by_worker[worker]:
                del self._by_worker[worker]

    def doubts(self, worker: str, server: str) -> bool:
        """Return True if ``worker`` has reported ``server``, which has not replied to a probe since."""
        row = self._by_worker.get(worker, {}).get(server)
        return row is not None and not row.wrong

    def suspects(self, now: float) -> dict[str, list[str]]:
        """Return the suspects, with the servers that they reported wrongly."""
        self._expire(now)
        return {
            worker: sorted(server for server, row in rows.items() if row.wrong)
            for worker, rows in sorted(self._by_worker.items())
            if self._is_suspect(worker)
        }

    def _is_suspect(self, worker: str) -> bool:
        return sum(row.wrong for row in self._by_worker.get(worker, {}).values()) >= self._rules.wrong

    def _expire(self, now: float) -> None:
        oldest = now - self._rules.window_s
        for worker, rows in list(self._by_worker.items()):
            for server in [server for server, row in rows.items() if row.time <= oldest]:
                del rows[server]
            if not rows:
                del self._by_worker[worker]
