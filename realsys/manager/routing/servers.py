"""Registry of the generation servers: versions, health, weight updates. Pure: time is an argument.

    registered ──> updating ──> ready at a verified version ──> updating ──> ...       (``health``: healthy, suspected,
                                                                                       quarantined)

Invariants:

fenced-weights         A server gets train tokens only for a version that it has verified, within the staleness bound.
                       While it updates it stays routable, because it generates while it stages. A failed or superseded
                       update changes nothing: it generates with the version that it has. ``in_use`` names the
                       versions that must not be pruned.
monotonic              Versions are ordered by (incarnation of the trainer, number). After ``roll_back`` no server is
                       trusted until the new trainer has published and the server has verified that version.
blame-needs-evidence   Reports and failed updates make the manager probe the server: see ``health``.
no-wait-for-the-dead   Servers update all together, or in turns (``Pace``): then a serving server takes a slot first,
                       oldest weights first, and loses it after a while. A server that serves no ticket needs no slot.

Each server has two tasks in the process: one runs ``next_order``, the other ``next_probe``. ``due`` names the servers
whose tasks must decide again. A server that leaves the name store is discarded; a new incarnation of it starts as
registered.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from realsys.manager.ledger.staleness import StalenessBound
from realsys.manager.routing.health import BlameRules, Health, Reports, backoff_s
from realsys.manager.routing.lending import Lending, Shift
from realsys.types import PublishedVersion, ServerAddress

State = Literal["registered", "draining", "updating", "ready", "suspected", "quarantined", "asleep"]


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
    asleep: bool | None = None  # of a lent server; None: not known
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
        if self.asleep:
            return "asleep"
        if self.draining:
            return "draining"
        if self.target is not None:
            return "updating"
        return "registered" if self.verified is None else "ready"


@dataclass(frozen=True, slots=True)
class Pace:
    """Limit on simultaneous updates: ``fraction`` of the serving servers, at least one; 1: all.

    A server loses its slot after ``retry_timeout_s``, so a slow or hanging server delays the others once.
    """

    fraction: float = 1.0
    retry_timeout_s: float = 30.0

    def slots(self, serving: int) -> int:
        """Return how many of ``serving`` servers may update at a time."""
        return max(1, int(self.fraction * serving))


@dataclass(frozen=True, slots=True)
class UpdateOrder:
    """An update to run.

    ``probe``: ask the server first, because it may have the version, or one of ``kept``, which an evaluation needs.
    ``sources``: see ``FanOut``. ``older``: the target is pinned; what the server samples must end before it is loaded.
    """

    server: str
    incarnation: str
    url: str
    target: PublishedVersion
    probe: bool = False
    sources: tuple[str, ...] = ()
    kept: tuple[PublishedVersion, ...] = ()
    older: bool = False

    def served(self, version: str, locator: str) -> UpdateOrder | None:
        """Return the order of the version that a server has by its answer to a probe; None if it must load."""
        for published in (self.target, *self.kept):
            if (str(published.version), published.locator) == (version, locator):
                return dataclasses.replace(self, target=published)
        return None


@dataclass(frozen=True, slots=True)
class Probe:
    """A question to run: which version does the server serve? ``serial``: see ``Health``."""

    server: str
    incarnation: str
    url: str
    serial: int
    verified: PublishedVersion | None


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do until something changes, or until the time ``until``."""

    until: float | None = None


class ServerRegistry:
    """All registered servers. Reports about a lost or restarted server are ignored."""

    def __init__(
        self,
        bound: StalenessBound,
        pace: Pace,
        blame: BlameRules | None = None,
        fan_out: FanOut | None = None,
        lent: frozenset[str] = frozenset(),
    ) -> None:
        self._bound = bound
        self.lending = Lending(lent)
        self.reports = Reports(blame or BlameRules())
        self._servers: dict[str, Server] = {}  # sorted by name
        self.published: PublishedVersion | None = None
        self.revision = 0  # grows with every change to the routes
        self.due: set[str] = set()  # servers with something to decide; the process empties it
        self.holds: dict[str, Hold] = {}  # server -> why it keeps its version
        self.kept: list[PublishedVersion] = []  # versions that servers keep for evaluations and pins
        self.pinned: dict[str, PublishedVersion] = {}  # server -> pinned version that it keeps, or loads
        self._pace = pace
        self._fan_out = fan_out or FanOut()
        self.trainer_incarnation = ""  # publications of older incarnations are refused
        self.updates = UpdateLog()

    # -- queries -------------------------------------------------------------------------------------------------------

    def all(self) -> list[Server]:
        return list(self._servers.values())

    def get(self, name: str) -> Server | None:
        return self._servers.get(name)

    def incarnation(self, name: str, incarnation: str) -> Server | None:
        """Return a server, None unless it is still this incarnation."""
        server = self._servers.get(name)
        return server if server is not None and server.address.incarnation == incarnation else None

    def take_holds(
        self, holds: dict[str, Hold], kept: list[PublishedVersion], pinned: dict[str, PublishedVersion]
    ) -> None:
        """Take over which servers keep their version for an evaluation or a pin, and which versions those are."""
        self.kept = kept
        if (holds, pinned) != (self.holds, self.pinned):
            self.due.update(self.holds.keys() | holds.keys() | self.pinned.keys() | pinned.keys())
            self.holds, self.pinned = holds, pinned
            self.revision += 1

    def goal(self, server: Server) -> PublishedVersion | None:
        """Return the version that the server must have: a pinned one, or the published one."""
        return self.pinned.get(server.name, self.published)

    def samples(self, server: Server, held: PublishedVersion) -> bool:
        """Return True if the server takes calls of a pinned version: it has it, and does not leave it."""
        return self.pinned.get(server.name) == held == server.verified and not server.quarantined

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
        return f"no routable server at version {version}, max_staleness {self._bound.eta}: {rows}"

    def current(self, server: Server) -> PublishedVersion | None:
        """Return the verified version of the current trainer that the server serves; None in quarantine or asleep."""
        if server.verified is None or server.quarantined or self.published is None or self.rests(server):
            return None
        return server.verified if server.verified.incarnation == self.published.incarnation else None

    def rests(self, server: Server) -> bool:
        """Return True if the server shares devices that the trainer has, or if it is not known to be awake."""
        return server.name in self.lending.lent and (self.lending.turn != "servers" or server.asleep is not False)

    def awake(self) -> list[str]:
        """Return the lent servers that are not known to sleep."""
        return [s.name for s in self._servers.values() if s.name in self.lending.lent and s.asleep is not True]

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
            served = self.current(server)
            if served is not None and (self.trusts(server) or server.name in self.holds):
                versions.add(served.version)
        return sorted(versions)

    def staging(self, minimum: int) -> int:
        """Count the servers that do not serve ``minimum`` yet, and are being updated to it or to a newer version."""
        return sum(
            server.target is not None
            and server.name not in self.pinned
            and server.target.version >= minimum
            and (server.verified is None or server.verified.version < minimum)
            for server in self._servers.values()
        )

    # -- events ------------------------------------------------------------------------------------------------------

    def observe(self, addresses: Iterable[ServerAddress]) -> list[str]:
        """Take over the name store's list. Returns the names of lost and restarted servers."""
        seen = {address.name: address for address in addresses}
        lost = [name for name, server in self._servers.items() if seen.get(name) != server.address]
        for name in lost:
            del self._servers[name]
            self.reports.discard(name)
        self._servers = {name: self._servers.get(name) or Server(seen[name]) for name in sorted(seen)}
        self._all_due()
        return lost

    def publish(self, published: PublishedVersion) -> bool:
        """Take over a published version. Returns False, without a change, if it is not newer (``monotonic``)."""
        if published.incarnation < self.trainer_incarnation:
            return False
        if self.published is not None and _age(published) <= _age(self.published):
            return False
        self.published = published
        self._all_due()
        for server in self._servers.values():
            server.retry_at = 0.0  # the new version may be readable where the last one was not
        return True

    def roll_back(self, incarnation: str) -> None:
        """Start the trainer ``incarnation``: trust no server before it has verified a version of this trainer."""
        self.trainer_incarnation, self.published = incarnation, None
        self._all_due()
        for server in self._servers.values():
            server.verified = None
            server.draining = False
            server.retry_at = 0.0
            if server.target is None:
                server.began = None  # the update that it was drained for is cancelled

    # -- updates -----------------------------------------------------------------------------------------------------

    def next_order(self, name: str, incarnation: str, now: float) -> UpdateOrder | Shift | Idle | None:
        """Return the next step of the update task of this incarnation; None ends the task."""
        server = self.incarnation(name, incarnation)
        if server is None:
            return None
        if (shift := self._shift(server, now)) is not None:
            return shift
        goal = self.goal(server)
        if goal is None or server.verified == goal or server.quarantined:
            return Idle()
        if (until := max(server.retry_at, self._held_until(server))) > now:
            return Idle(until)
        if (until := self._turn(server, now)) > now:
            return Idle(until)
        probe, older = server.verified is None, goal != self.published
        sources = STORAGE if older else self._fan_out.sources(server, self._servers.values(), goal, now)
        server.waits = isinstance(sources, float)
        if isinstance(sources, float):
            return Idle(sources)
        kept = tuple(version for version in (*self.kept, self.published) if version) if probe else ()
        return UpdateOrder(name, incarnation, server.address.url, goal, probe, sources, kept, older)

    def _shift(self, server: Server, now: float) -> Shift | Idle | None:
        """Return the order that a lent server needs for the turn that it is; None if it may update."""
        if server.name not in self.lending.lent:
            return None
        turn = self.lending.turn
        sleeps = turn == "trainer"
        if turn == "unknown" or server.quarantined or server.asleep is sleeps or (not sleeps and not self.published):
            return None if server.asleep is False and turn == "servers" else Idle()
        if server.retry_at > now:
            return Idle(server.retry_at)
        if not sleeps:
            server.asleep = None  # from the order on: it may have memory before it says so
        return Shift(server.name, server.address.incarnation, server.address.url, sleeps)

    def shifted(self, order: Shift, now: float) -> None:
        """Record that a lent server has fallen asleep or has woken."""
        if server := self.incarnation(order.server, order.incarnation):
            server.asleep = order.sleeps
            server.verified, server.failures, server.error = None, 0, ""
            server.began = None if order.sleeps else now
            if not order.sleeps:
                self.lending.awake(now)
            self._changed(server)

    def unshifted(self, order: Shift, error: str, now: float) -> None:
        """Record that a lent server did not follow an order. It gets the order again after a while."""
        if server := self.incarnation(order.server, order.incarnation):
            server.asleep, server.verified, server.error = None, None, error[:500]
            server.retry_at = now + backoff_s(server.failures)
            server.failures += 1
            server.health.apply("update_failed", now)
            self._changed(server)

    def turn_changed(self) -> None:
        """Let all servers decide again: devices have changed hands."""
        self._all_due()
        for server in self._servers.values():
            server.retry_at = 0.0
        self._wake()

    def _held_until(self, server: Server) -> float:
        """Return until when the server keeps its version for an evaluation; 0 if it does not."""
        hold = self.holds.get(server.name)
        return hold.until if hold is not None and server.verified is not None else 0.0

    def _turn(self, server: Server, now: float) -> float:
        """Return when to ask again for a slot if nothing changes; ``now`` if the server has one."""
        if self._pace.fraction >= 1 or server.began is not None or not self.trusts(server):
            return now
        serving = [s for s in self._servers.values() if self.trusts(s)]
        ends = [s.began + self._pace.retry_timeout_s for s in serving if s.began is not None]
        holding = [end for end in ends if end > now]
        # A server that waits for the time after a failed update, or keeps its version, must not keep the slot from the
        # others.
        waiting = [
            s
            for s in serving
            if s.began is None
            and max(s.retry_at, self._held_until(s)) <= now
            and s.verified is not None
            and s.verified != self.goal(s)
        ]
        waiting.sort(key=lambda s: (s.verified.version if s.verified else 0, s.name))
        free = self._pace.slots(len(serving)) - len(holding)
        if any(s is server for s in waiting[: max(0, free)]):
            return now
        # A free slot belongs to another server, which may hang from now on.
        return min(holding) if free <= 0 else now + self._pace.retry_timeout_s

    def started(self, order: UpdateOrder, now: float) -> None:
        if server := self.incarnation(order.server, order.incarnation):
            server.target = order.target
            if order.older:
                server.verified = None  # what it samples now ends there, and goes on elsewhere
                self.revision += 1
            server.source = next(iter(order.sources), "")
            server.reads_since = now
            server.waits = False
            # The servers of its host may share its copy. Then each wakes the next, until one must wait.
            self.due.update(s.name for s in self._waiting() if s.address.host == server.address.host)
            self._wake()
            server.began = now if server.began is None else server.began

    def drain(self, order: UpdateOrder, now: float) -> None:
        """Route no new ticket to the server until it has been updated."""
        if server := self.incarnation(order.server, order.incarnation):
            server.draining = True
            self.revision += 1
            server.began = now if server.began is None else server.began

    def succeeded(self, order: UpdateOrder, seconds: float, timings: Mapping[str, float] | None) -> bool:
        """Record that the server serves the order's version, which also proves that it is healthy.

        ``timings`` of its update; None if it had the version before. Returns False for another incarnation.
        """
        server = self.incarnation(order.server, order.incarnation)
        if server is None:
            return False
        if timings is not None:
            self.updates.add(order.server, order.target.version, server.began or 0.0, seconds, timings)
            server.update_s, server.timings = seconds, dict(timings)
            server.updates += 1
            if server.name in self.lending.lent and server.verified is None:
                self.lending.woke(seconds)
        self._ended(server)
        began_before_roll_back = self._is_undone(order.target)
        server.verified = None if began_before_roll_back else order.target
        server.failures = 0
        server.error = ""
        server.health.apply("updated")
        return True

    def failed(self, order: UpdateOrder, error: str, now: float) -> bool:
        """Record a failed update, and probe the server; it keeps the version that it has verified.

        The next update is that of the newest version, after a delay if this one was the newest. Returns False for
        another incarnation.
        """
        server = self.incarnation(order.server, order.incarnation)
        if server is None:
            return False
        self.updates.add_failure(order.server, order.target.version, server.began or now, error[:500])
        self._ended(server)
        if self._is_undone(order.target):
            return True  # weights of an older trainer: they are of no use
        server.error = error[:500]
        if self.goal(server) == order.target:
            server.retry_at = now + backoff_s(server.failures)
        server.failures += 1
        server.health.apply("update_failed", now)
        return True

    def _is_undone(self, version: PublishedVersion) -> bool:
        """Return True for a version of an older trainer that is not pinned."""
        return version.incarnation < self.trainer_incarnation and version not in self.pinned.values()

    def _ended(self, server: Server) -> None:
        server.target = None
        server.began = None
        server.draining = False
        self._changed(server)

    # -- evidence ----------------------------------------------------------------------------------------------------

    def report(self, name: str, epoch: int, worker: str, error: str, now: float) -> None:
        """Take over the report of a worker whose call failed on a server (``blame-needs-evidence``).

        Ignored if the call is older than the server's last proof, if the server is in quarantine, or if the worker is
        a suspect.
        """
        server = self._servers.get(name)
        if server is None or server.health.epoch != epoch or server.quarantined:
            return
        verdict = self.reports.add(worker, name, now)
        if verdict != "ignored":
            server.error = f"{worker}: {error}"[:500]
            server.health.apply(verdict, now)
            self._changed(server)

    def next_probe(self, name: str, incarnation: str, now: float) -> Probe | Idle | None:
        """Return the next step of the probe task of this incarnation; None ends the task."""
        server = self.incarnation(name, incarnation)
        if server is None:
            return None
        if server.health.state == "healthy":
            return Idle()
        if server.health.probe_at > now:
            return Idle(server.health.probe_at)
        return Probe(name, incarnation, server.address.url, server.health.serial, server.verified)

    def silent(self, probe: Probe, error: str, now: float) -> bool:
        """Quarantine a server that did not answer its probe. False, without a change, if the probe was overtaken."""
        server = self._probed(probe)
        if server is None:
            return False
        server.error = error[:500]
        server.health.apply("silent", now)
        self.reports.discard(probe.server)
        self._changed(server)
        return True

    def answered(self, probe: Probe, version: str, locator: str, now: float) -> list[str]:
        """Return a server to routing that answered its probe: it serves ``version`` from ``locator``.

        It needs no update if that is the right version; if it is an unexpected one, it must be updated first. Returns
        the workers that are suspects since, because they reported too many servers that answer.
        """
        server = self._probed(probe)
        if server is None:
            return []

        def serves(published: PublishedVersion | None) -> bool:
            return published is not None and (str(published.version), published.locator) == (version, locator)

        if serves(self.published) and server.target is None:
            server.verified = self.published
        elif server.verified == probe.verified and not serves(server.verified) and not serves(server.target):
            server.verified = None  # it was restarted or changed behind the manager's back
        server.health.apply("answered", now)
        self._changed(server)
        return self.reports.answered(probe.server, now)

    def _probed(self, probe: Probe) -> Server | None:
        """Return the server of a probe; None if it is gone, or if something else has changed its health since."""
        server = self.incarnation(probe.server, probe.incarnation)
        return server if server is not None and server.health.serial == probe.serial else None

    def _changed(self, server: Server) -> None:
        self.revision += 1
        self.due.add(server.name)
        if self._pace.fraction < 1:
            self._all_due()  # it may have freed a slot
        self._wake()  # its host may send the version now, or another may read the storage

    def _waiting(self) -> list[Server]:
        """Return the servers that wait for a host to read from, or for the storage."""
        return [server for server in self._servers.values() if server.waits and not server.quarantined]

    def _wake(self) -> None:
        """Let the first waiting server decide again whose own host is free. All would be too many."""
        if self.published is None or not (waiting := self._waiting()):
            return
        busy = self._fan_out.sends_older(self._servers.values(), self.published, -math.inf)
        if name := next((server.name for server in waiting if server.address.host not in busy), ""):
            self.due.add(name)

    def _all_due(self) -> None:
        self.revision += 1
        self.due.update(self._servers)


def _age(published: PublishedVersion) -> tuple[str, int]:
    return published.incarnation, published.version


# ---- which server reads a version from the shared storage, and which from a host that has it. Pure
#
#     a server of its host has or reads it      ──> now: the servers of a host share one copy
#     its host sends an older version           ──> wait: that copy must stay as it is until it has arrived
#     a host has it and sends it to none        ──> from there
#     fewer hosts than allowed read storage     ──> from storage
#     otherwise                                 ──> wait, until one of these is so
#
# A host sends to one host at a time, at full speed: the number of hosts that have the version doubles in each round.
#
# ``no-wait-for-the-dead``: a reader of the storage counts for ``patience_s``, and so does a transfer of an older
# version. So a reader that hangs is replaced by one other, not by all that wait.


STORAGE: tuple[str, ...] = ()  # sources of a server that reads the shared storage


@dataclass(frozen=True, slots=True)
class FanOut:
    """Limits of the way of a version to the hosts.

    storage_readers  hosts that read a version from the shared storage at a time; 0: all of them
    patience_s       time after which a host does not wait for a reader of the storage, or for its own transfer
    """

    storage_readers: int = 0
    patience_s: float = 60.0

    def sources(
        self, server: Server, servers: Iterable[Server], published: PublishedVersion, now: float
    ) -> tuple[str, ...] | float:
        """Return the URLs of the copies that a server may read, ``STORAGE`` for none.

        If it must wait: the time at which it must ask again, unless something changes before.
        """
        host, servers = server.address.host, list(servers)
        if not self.storage_readers or not server.address.copies:
            return STORAGE
        copies: dict[str, str] = {}  # host that has the version -> URL of its copy
        reading: dict[str, Server] = {}  # host that reads it -> the first of its servers that do
        for other in servers:
            if other.verified == published and other.address.copies and not other.quarantined:
                copies.setdefault(other.address.host, other.address.copies)
            elif other.target == published:
                reading.setdefault(other.address.host, other)
        if host in copies or host in reading:
            return STORAGE
        if (until := self.sends_older(servers, published, now).get(host, now)) > now:
            return until
        free = sorted(set(copies.values()) - {reader.source for reader in reading.values()})
        if free:
            return (free[0],)
        ends = [reader.reads_since + self.patience_s for reader in reading.values() if not reader.source]
        ends = [end for end in ends if end > now]
        return min(ends) if len(ends) >= self.storage_readers else STORAGE

    def sends_older(self, servers: Iterable[Server], published: PublishedVersion, now: float) -> dict[str, float]:
        """Return the hosts that send another version than ``published``, with the time until which they should."""
        servers = list(servers)
        transfers = {
            other.source: other.reads_since + self.patience_s
            for other in servers
            if other.source and other.target is not None and other.target != published
        }
        ends = ((other.address.host, transfers.get(other.address.copies, now)) for other in servers)
        return {host: end for host, end in ends if end > now}


# ---- times of weight updates: the last ones for the status page, all of them as histograms


#: Seconds that a server reports of an update: it stages (reads, verifies, prepares) while it generates, and pauses to
#: load; ``first_token_s`` runs from the swap to the first token of the new weights. Unreported stages are absent.
#: ``total_s`` is measured by the manager, from its call until it has verified that the version is served.
STAGES = ("stage_s", "verify_s", "pause_s", "load_s", "first_token_s", "total_s")
BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
RECENT = 64  # updates on the status page


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """One update of one server. ``began``: unix seconds. ``error`` is empty when it succeeded."""

    server: str
    version: int
    began: float
    timings: dict[str, float]
    error: str = ""

    def row(self) -> dict[str, Any]:
        """Return the record for GET /status: a stage that was not reported is None."""
        stages = {stage: self.timings.get(stage) for stage in STAGES}
        return {"server": self.server, "version": self.version, "began": self.began, "error": self.error, **stages}


@dataclass(slots=True)
class Histogram:
    """Counts per bucket; the last bucket is beyond all bounds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total: float = 0.0  # seconds

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, int]]:
        """Return Prometheus' (upper bound, observations up to it); the last bound is ``+Inf``."""
        bounds = [*(f"{bound:g}" for bound in BUCKETS_S), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


class UpdateLog:
    """Log of bounded size."""

    def __init__(self) -> None:
        self.recent: deque[UpdateRecord] = deque(maxlen=RECENT)
        self.histograms: dict[str, Histogram] = {}
        self.failures = 0

    def add(self, server: str, version: int, began: float, seconds: float, timings: Mapping[str, float]) -> None:
        """Add an update that succeeded after ``seconds``."""
        reported = {stage: float(timings[stage]) for stage in STAGES if stage in timings} | {"total_s": seconds}
        self.recent.append(UpdateRecord(server, version, began, reported))
        for stage, value in reported.items():
            self.histograms.setdefault(stage, Histogram()).add(value)

    def add_failure(self, server: str, version: int, began: float, error: str) -> None:
        self.recent.append(UpdateRecord(server, version, began, {}, error))
        self.failures += 1
