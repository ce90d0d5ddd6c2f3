"""The servers that the manager knows, with their states. Nothing here changes one: ``ServerRegistry`` does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from realsys.manager.ledger.staleness import StalenessBound
from realsys.manager.routing.health import BlameRules, Health, Reports
from realsys.types import PublishedVersion, ServerAddress

State = Literal["registered", "draining", "updating", "ready", "suspected", "quarantined"]


@dataclass(frozen=True, slots=True)
class Hold:
    """A server must not update before ``until``. ``keeps``: it takes new completions of the evaluation, too."""

    until: float
    keeps: bool


@dataclass(slots=True)
class Server:
    """One incarnation of one server."""

    address: ServerAddress
    verified: PublishedVersion | None = None
    target: PublishedVersion | None = None  # version of the update under way
    source: str = ""  # service of another host from which it reads that version; empty: storage
    reads_since: float = 0.0  # start of the reading of that version
    waits: bool = False  # True: its next update waits until a host can send the version or the storage is free
    began: float | None = None  # start of that update, or of draining for it
    draining: bool = False  # takes no new rollout until it has been updated
    failures: int = 0  # failed updates in a row
    retry_at: float = 0.0  # time of the next update after a failed one
    error: str = ""  # last failure
    updates: int = 0
    update_s: float = 0.0  # seconds of the last update
    timings: dict[str, float] = field(default_factory=dict)
    load: dict[str, float] = field(default_factory=dict)  # reported by the server; empty before its first report
    health: Health = field(init=False)

    def __post_init__(self) -> None:
        self.health = Health(self.name)

    @property
    def name(self) -> str:
        return self.address.name

    @property
    def quarantined(self) -> bool:
        return self.health.state == "quarantined"

    @property
    def state(self) -> State:
        if self.health.state != "healthy":
            return self.health.state
        if self.draining:
            return "draining"
        if self.target is not None:
            return "updating"
        return "registered" if self.verified is None else "ready"


class ServerTable:
    """Queries about the servers."""

    def __init__(self, bound: StalenessBound, blame: BlameRules) -> None:
        self._bound = bound
        self.reports = Reports(blame)
        self._servers: dict[str, Server] = {}  # sorted by name
        self.published: PublishedVersion | None = None
        self.revision = 0  # grows with every change to the routes
        self.due: set[str] = set()  # servers with something to decide; the shell empties it
        self.holds: dict[str, Hold] = {}  # server -> why it keeps its version
        self.kept: list[PublishedVersion] = []  # versions that servers keep for evaluations

    def all(self) -> list[Server]:
        return list(self._servers.values())

    def get(self, name: str) -> Server | None:
        return self._servers.get(name)

    def incarnation(self, name: str, incarnation: str) -> Server | None:
        """Return a server, None unless it is still this incarnation."""
        server = self._servers.get(name)
        return server if server is not None and server.address.incarnation == incarnation else None

    def take_holds(self, holds: dict[str, Hold], kept: list[PublishedVersion]) -> None:
        """Take over which servers keep their version for an evaluation, and which versions those are."""
        self.kept = kept
        if holds != self.holds:
            self.due.update(self.holds.keys() | holds.keys())
            self.holds = holds
            self.revision += 1

    def evaluates(self, server: Server, version: int) -> bool:
        """Return True if the server takes new completions of an evaluation of exactly ``version``.

        Not one that will leave this version: an update in the middle would mix versions.
        """
        served = self.current(server)
        if served is None or served.version != version:
            return False
        hold = self.holds.get(server.name)
        return served == self.published or (hold is not None and hold.keeps)

    def unasked(self) -> bool:
        """Return True while a server may have a version that the manager does not know of, as after its restart."""
        return any(s.verified is None and not s.failures and not s.quarantined for s in self.all())

    def explain(self) -> str:
        """Return why no server is routable: one line, with the state of each."""
        states = [
            f"{s.name} {s.state} at {s.verified.version if s.verified else 'no version'}"
            + (f" ({s.error})" if s.error else "")
            for s in self.all()
        ]
        version = self.published.version if self.published else -1
        rows = "; ".join(states) or "none registered"
        return f"no routable server at version {version}, eta {self._bound.eta}: {rows}"

    def current(self, server: Server) -> PublishedVersion | None:
        """Return the verified version of the current trainer that the server serves; None in quarantine."""
        if server.verified is None or server.quarantined or self.published is None:
            return None
        return server.verified if server.verified.incarnation == self.published.incarnation else None

    def trusts(self, server: Server) -> bool:
        """Return True if train tokens may be sampled on this server: verified, not in quarantine, fresh enough."""
        served = self.current(server)
        return (
            served is not None
            and self.published is not None
            and (self._bound.may_serve(served.version, self.published.version))
        )

    def avoids(self, worker: str, name: str) -> bool:
        """Return True while a server that ``worker`` has reported is being probed."""
        server = self._servers.get(name)
        return server is not None and server.health.state == "suspected" and self.reports.doubts(worker, name)

    def in_use(self) -> list[int]:
        """Return the versions of the current trainer that must not be pruned (``fenced-weights``), oldest first.

        The last one is the published version: no server will begin an older one. A dead server keeps no version for
        ever: an update has a time limit, and a verified version counts only within the staleness bound, or while
        the server keeps it for an evaluation, which has a time limit, too.
        """
        if self.published is None:
            return []
        versions = {self.published.version}
        for server in self._servers.values():
            if server.target is not None and server.target.incarnation == self.published.incarnation:
                versions.add(server.target.version)
            if server.verified is not None and (self.trusts(server) or server.name in self.holds):
                versions.add(server.verified.version)
        return sorted(versions)

    def staging(self, minimum: int) -> int:
        """Count the servers that do not serve ``minimum`` yet, and are being updated to it or to a newer version."""
        return sum(
            server.target is not None
            and server.target.version >= minimum
            and (server.verified is None or server.verified.version < minimum)
            for server in self._servers.values()
        )
