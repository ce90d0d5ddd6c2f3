"""The manager as a process of the simulation: the production state with its journal, held calls and weight updates.

    call ──delay──> decide (production) ──> journal, audit ──> held until settled ──delay──> reply
    change ──> held calls are decided again; UpdateOrders go to the servers

This module and ``costs.trainer_costs`` are the only ones that know how the production machines are driven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec

from realsys.cluster.journal import encode_record
from realsys.lab.simulation.clock import Clock
from realsys.manager.audit import Auditor
from realsys.manager.commit_loop import HeldAllocations
from realsys.manager.decisions import ManagerSettings, ManagerState
from realsys.manager.ledger.events import Event
from realsys.manager.ledger.journal import decode_record
from realsys.manager.messages import MAX_WAIT_S, AllocateRequest, NoServer, Refusal
from realsys.manager.operations import Operation
from realsys.manager.routing.lending import Shift
from realsys.manager.routing.placement import LOAD_PERIOD_S
from realsys.manager.routing.servers import Idle, Probe, UpdateOrder
from realsys.types import PublishedVersion, ServerAddress

#: Receives the reply, or the refusal.
Reply = Callable[[Any], None]
LEASE_CLOCK_S = 15.0  # between two checks of the leases
RETRY_S = 1.0  # between two tries of a client


@dataclass(slots=True)
class _Held:
    """A call that waits for a change."""

    operation: Operation[Any, Any]
    request: Any
    reply: Reply
    since: float
    place: int = -1  # place of an allocation in the queue for tickets


class SimulatedJournal:
    """The journal in memory. Each record is audited as it is written."""

    def __init__(self) -> None:
        self.auditor = Auditor()
        self.records = 0  # written so far
        self.observe: Callable[[Event], None] = lambda _: None  # gets each record
        self.compact_above = 20_000  # records
        self._lines: list[bytes] = []

    def write(self, events: Iterable[Event], snapshot: Callable[[], Event]) -> None:
        """Append the events. A journal that is too long then has only the snapshot."""
        for event in events:
            self.records += 1
            self.auditor.observe(event, self.records)
            self.observe(event)
            self._lines.append(encode_record(event))
        if len(self._lines) > self.compact_above:
            self._lines = [encode_record(snapshot())]

    def events(self) -> list[Event]:
        """Return the records."""
        return [event for line in self._lines if (event := decode_record(line)) is not None]


class ManagerMachine:
    """The GserverManager. It survives restarts: only the journal and the name store remain of its state."""

    def __init__(self, clock: Clock, settings: ManagerSettings, servers: Servers, call_s: float) -> None:
        self.clock = clock
        self.settings = settings
        self.state = ManagerState(settings)
        self.journal = SimulatedJournal()
        self.up = True
        self.lose_replies = 0  # replies that get lost next
        self._servers = servers
        self._call_s = call_s
        self._held: list[_Held] = []
        self._waiting: dict[str, _Held] = {}  # allocations, by worker
        self._away: list[tuple[Operation[Any, Any], Any, Reply]] = []
        self._grants = HeldAllocations()
        self._tasks = ServerTasks(self.state, clock, servers, call_s, self._settle)
        self._revision = -1  # revision of the servers at the last wake
        self._deciding = False
        # the name store
        self.published: PublishedVersion | None = None
        self.addresses: list[ServerAddress] = []
        self.heartbeats: dict[str, str] = {}
        self.state.open(clock.now)
        self._commit()
        clock.after(LEASE_CLOCK_S, self._check_leases)
        clock.after(LOAD_PERIOD_S, self._poll_loads)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(self, operation: Operation[Any, Any], request: Any, reply: Reply) -> None:
        """Send a call; ``reply`` gets its reply or Refusal later. A manager that is away gets it once it is back."""
        self.clock.after(self._call_s, self._receive, operation, request, reply)

    def _receive(self, operation: Operation[Any, Any], request: Any, reply: Reply) -> None:
        if not self.up:
            self._away.append((operation, request, reply))
            return
        held = _Held(operation, request, reply, self.clock.now)
        if self._decide(held):
            return
        if operation.grants:
            held.place = self._grants.place()
            self._waiting[request.worker] = held
            self._grants.hold(held.place, partial(self._has_turn, held))
        else:
            self._held.append(held)
            self.clock.after(operation.held_s(request), self._give_up, held)

    def _decide(self, held: _Held, *, last: bool = False) -> bool:
        """Decide a call. Returns True if it has its reply, False if it is held."""
        operation, request = held.operation, held.request
        self.state.asking = len(self._grants)
        try:
            result: Any = operation.decide(self.state, request, self.clock.now)
            settled = operation.settled(result)
        except NoServer as refusal:
            result, settled = refusal, False
        except Refusal as refusal:
            result, settled = refusal, True
        self._commit()
        self._wake()
        if not settled and not last and operation.held_s(request) > 0:
            return False
        if self.lose_replies and not isinstance(result, Refusal):
            self.lose_replies -= 1
            self.clock.after(RETRY_S, self.call, operation, request, held.reply)
        else:
            self.clock.after(self._call_s, held.reply, result)
        return True

    def _give_up(self, held: _Held) -> None:
        """Answer a held call whose time is over."""
        if any(held is other for other in self._held):
            self._held = [other for other in self._held if other is not held]
            self._decide(held, last=True)

    def _has_turn(self, held: _Held) -> None:
        self.clock.after(0.0, self._decide_allocation, held)

    def _decide_allocation(self, held: _Held) -> None:
        """Decide a held allocation that has a turn."""
        if self._waiting.get(held.request.worker) is not held:
            return  # its worker is gone, or the manager has restarted
        self._grants.decided(held.place)
        if self._decide(held):
            del self._waiting[held.request.worker]
        else:
            self._grants.hold(held.place, partial(self._has_turn, held))

    def hang_up(self, worker: str) -> None:
        """Drop the held allocation of a worker that is gone."""
        self._away = [entry for entry in self._away if getattr(entry[1], "worker", "") != worker]
        if held := self._waiting.pop(worker, None):
            self._grants.leave(held.place)
            if self._grants.decided(held.place):
                self._wake()

    def _wake(self) -> None:
        """Decide again what may be decided otherwise now: servers with something to do, held calls, allocations."""
        for name in sorted(self.state.take_due()):
            self.clock.after(0.0, self._tasks.look, name)
        if self._revision != self.state.servers.revision:
            self._revision = self.state.servers.revision
            if self._held and not self._deciding:
                self._deciding = True
                self.clock.after(0.0, self._decide_held)
        if self._grants and (tickets := self.state.grantable()):
            # new places for allocations whose hold has ended: their workers have called again (without events)
            now = self.clock.now
            ended = [call for call in self._waiting.values() if now - call.since >= MAX_WAIT_S]
            for call in sorted(ended, key=lambda call: -((now - call.since) % MAX_WAIT_S)):
                call.since = now - (now - call.since) % MAX_WAIT_S
                if self._grants.leave(call.place):
                    call.place = self._grants.place()
                    self._grants.hold(call.place, partial(self._has_turn, call))
            self._grants.wake(tickets)

    def _decide_held(self) -> None:
        self._deciding = False
        held, self._held = self._held, []
        self._held += [call for call in held if not self._decide(call)]

    # -- name store and clock ------------------------------------------------------------------------------------------

    def publish(self, published: PublishedVersion) -> None:
        """Set the key of the newest version."""
        self.published = published
        if self.up:
            self.state.servers.publish(published)
            self._settle()

    def observe_servers(self, addresses: Iterable[ServerAddress]) -> None:
        """Set the keys of the servers."""
        self.addresses = list(addresses)
        if self.up:
            self.state.observe_servers(self.addresses)
            self._settle()

    def observe_workers(self, heartbeats: dict[str, str]) -> None:
        """Set the keys of the workers' heartbeats."""
        self.heartbeats = dict(heartbeats)
        if self.up:
            self.state.observe_workers(self.heartbeats, self.clock.now)
            self._settle()

    def _check_leases(self) -> None:
        self.clock.after(LEASE_CLOCK_S, self._check_leases)
        if self.up:
            self.state.expire(self.clock.now)
            self._settle()

    def _poll_loads(self) -> None:
        self.clock.after(LOAD_PERIOD_S, self._poll_loads)
        self._tasks.poll_loads()

    def _settle(self) -> None:
        self._commit()
        self._wake()

    # -- journal -------------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        events, self.state.outbox = self.state.outbox, []
        self.journal.write(events, lambda: self.state.snapshot(self.clock.now))

    def stop(self) -> None:
        """End the process. Held calls are repeated by their clients."""
        self.up = False
        held = [*self._held, *self._waiting.values()]
        self._away += [(call.operation, call.request, call.reply) for call in held]
        self._held, self._waiting = [], {}
        self._grants = HeldAllocations()
        self._tasks.stop()

    def start(self) -> None:
        """Start again from the journal, then read the name store and answer the clients."""
        self.state = ManagerState(self.settings)
        self._tasks = ServerTasks(self.state, self.clock, self._servers, self._call_s, self._settle)
        self.state.restore_from(self.journal.events())
        self.state.open(self.clock.now)
        self.up = True
        self._commit()
        if self.published is not None:
            self.state.servers.publish(self.published)
        self.observe_servers(self.addresses)
        self.observe_workers(self.heartbeats)
        away, self._away = self._away, []
        for entry in away:
            self.call(*entry)
        self._settle()


def heartbeat(kind: str, index: int, incarnation: str) -> str:
    """Return the value of a worker's heartbeat key."""
    beat = {"kind": kind, "index": index, "host": "simulated", "incarnation": incarnation, "state": "running"}
    return msgspec.json.encode(beat).decode()


def allocate_request(worker: str, count: int, number: int, incarnation: str) -> AllocateRequest:
    """Return a worker's ``number``-th allocation. Its id is not random, so that a simulation can be repeated."""
    return AllocateRequest(worker, count, MAX_WAIT_S, f"{worker}.{incarnation}.{number}", incarnation)


# ---- ServerTasks: the manager's tasks for each server of a simulation: weight updates, probes, loads
#
# look ──> state: next order, next probe ──delay──> server ──delay──> state ──> settle


class Servers(Protocol):
    """The servers as the manager reaches them."""

    def model_info(self, name: str, incarnation: str) -> tuple[str, str] | None:
        """Return version and locator that a server reports; None if it does not answer."""
        ...

    def server_load(self, name: str, incarnation: str) -> tuple[int, int] | None:
        """Return sequences and cached tokens that a server reports; None if it does not answer."""
        ...

    def load(self, order: UpdateOrder, done: Callable[[str], None]) -> None:
        """Load the target; call ``done`` with the error, or "" at the end."""
        ...

    def shift(self, order: Shift, done: Callable[[str], None]) -> None:
        """Let a server sleep or wake; call ``done`` with the error, or "" at the end."""
        ...


class ServerTasks:
    """Tasks of one life of the manager. After ``stop`` no reply of a server reaches its state."""

    def __init__(
        self, state: ManagerState, clock: Clock, servers: Servers, call_s: float, settle: Callable[[], None]
    ) -> None:
        """``settle`` writes the journal and wakes what waits for a change of the state."""
        self._state = state
        self._clock = clock
        self._servers = servers
        self._call_s = call_s
        self._settle = settle
        self._stopped = False
        self._updating: set[tuple[str, str]] = set()
        self._probing: set[tuple[str, str]] = set()

    def stop(self) -> None:
        """End all tasks. The manager that starts next asks the servers again."""
        self._stopped = True

    def poll_loads(self) -> None:
        """Ask every server for its load."""
        for server in self._state.servers.all() if not self._stopped else ():
            if load := self._servers.server_load(server.name, server.address.incarnation):
                self._state.reservations.report(server.name, *load, self._clock.now)

    def look(self, name: str) -> None:
        """Run both tasks of a server up to their next wait."""
        state = self._state
        server = state.servers.get(name)
        if self._stopped or server is None:
            return
        key, now = (name, server.address.incarnation), self._clock.now
        if key not in self._updating:
            order = state.next_order(*key, now)
            if isinstance(order, UpdateOrder):
                self._update(key, order)
            elif isinstance(order, Shift):
                self._shift(key, order)
            elif isinstance(order, Idle) and order.until is not None:
                self._clock.at(order.until, self.look, name)
            if state.outbox or state.servers.due:
                self._settle()  # an evaluation keeps other servers now, or has lost its version
        if key not in self._probing:
            probe = state.servers.next_probe(*key, now)
            if isinstance(probe, Probe):
                self._probing.add(key)
                self._clock.after(2 * self._call_s, self._probed, key, probe)
            elif isinstance(probe, Idle) and probe.until is not None:
                self._clock.at(probe.until, self.look, name)

    def _probed(self, key: tuple[str, str], probe: Probe) -> None:
        if self._stopped:
            return
        self._probing.discard(key)
        info = self._servers.model_info(*key)
        if info is None:
            self._state.servers.silent(probe, "connection refused", self._clock.now)
        else:
            self._state.servers.answered(probe, *info, self._clock.now)
        self._settle()

    def _shift(self, key: tuple[str, str], order: Shift) -> None:
        self._updating.add(key)

        def ended(error: str) -> None:
            if self._stopped:
                return
            self._updating.discard(key)
            if error:
                self._state.servers.unshifted(order, error, self._clock.now)
            else:
                self._state.servers.shifted(order, self._clock.now)
            self._settle()

        self._servers.shift(order, ended)

    def _update(self, key: tuple[str, str], order: UpdateOrder) -> None:
        began = self._clock.now
        if not self._state.begin_update(order, began):
            return
        self._updating.add(key)
        info = self._servers.model_info(*key) if order.probe else None
        served = order.served(*info) if info is not None else None

        def ended(error: str, timings: dict[str, float] | None) -> None:
            if self._stopped:
                return
            self._updating.discard(key)
            if error:
                self._state.servers.failed(order, error, self._clock.now)
            else:
                self._state.servers.succeeded(served or order, self._clock.now - began, timings)
            self._settle()

        if served is not None:
            self._clock.after(self._call_s, ended, "", None)
        else:
            self._servers.load(order, lambda error: ended(error, None if error else {}))
