"""ServerTasks: the manager's tasks for each server of a simulation: weight updates, probes, loads.

look ──> state: next order, next probe ──delay──> server ──delay──> state ──> settle
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from realsys.manager.routing.servers import Idle, Probe, UpdateOrder
from realsys.manager.state import ManagerState
from realsys.simulate.clock import Clock


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
