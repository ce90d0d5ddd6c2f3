"""Rules of the manager's random histories for all that is around it: servers, versions, workers, the clock."""

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, multiple, precondition, rule

from realsys.manager.routing.servers import Probe, UpdateOrder
from realsys.types import ServerAddress
from tests.support.ledger.manager_model import ETA, LEASE_S, SERVERS, WORKERS, B, ManagerModel, Truth


class SurroundingsMachine(ManagerModel):
    """Servers come, go, update and are probed; workers start and die; time passes."""

    orders: Bundle[UpdateOrder] = Bundle("orders")

    # -- servers and versions ------------------------------------------------------------------------------------------

    @rule(index=SERVERS)
    def server_joins(self, index: int) -> None:
        """New, or restarted before anyone noticed that it had died."""
        self.births += 1
        name = f"generation_server/{index}"
        self.servers[name] = Truth(ServerAddress(name, f"http://h:{self.births}", 1, "h", str(self.births)))
        self.register()
        assert self.state.reservations.load(name) == (0, 0)

    @precondition(lambda self: len(self.servers) > 1)
    @rule(index=SERVERS)
    def server_leaves(self, index: int) -> None:
        self.servers.pop(f"generation_server/{index}", None)
        self.register()

    @precondition(lambda self: self.version * B <= 6 + self.counted())
    @rule()
    def publish(self) -> None:
        self.version += 1
        assert self.state.servers.publish(self.published(self.version))
        assert not self.state.servers.publish(self.published(self.version - 1)), "versions never go back"

    @rule(target=orders, index=SERVERS)
    def order(self, index: int) -> UpdateOrder | object:
        truth = self.servers.get(f"generation_server/{index}")
        if truth is None:
            return multiple()
        order = self.state.next_order(truth.address.name, truth.address.incarnation, self.now)
        self.commit()
        if not isinstance(order, UpdateOrder):
            return multiple()
        assert order.target.version == self.version and order.url == truth.address.url
        assert not self.evaluates(truth.address.name), "an update in the middle of an evaluation's completion"
        if self.settings.pace.fraction < 1 and self.serves(truth, self.version - ETA) and truth.began is None:
            serving = [other for other in self.servers.values() if self.serves(other, self.version - ETA)]
            slots = max(1, int(self.settings.pace.fraction * len(serving)))
            assert sum(self.holds_slot(other) for other in serving) < slots, "more servers update than may at a time"
        began = self.state.begin_update(order, self.now)
        truth.began = self.now if truth.began is None else truth.began
        if not began:
            assert not self.settings.interruptible
            truth.draining = True
            return multiple()
        if not self.settings.interruptible:
            assert self.state.reservations.load(order.server) == (0, 0), "an update in the middle of an answer"
            assert not any(self.runs_unseen(*attempt) for attempt in self.unplaced), "an answer whose place is unknown"
        return order

    def evaluates(self, name: str) -> bool:
        """Return True if a completion of an evaluation is sampled there, with the version that the server serves."""
        server, reservations = self.state.servers.get(name), self.state.reservations
        if server is None or self.state.servers.current(server) is None:
            return False
        return any(
            place.server == name and place.version == problem.ticket.version
            for problem in self.state.evaluations.running.values()
            for call in reservations.calls(problem.ticket_id)
            if (place := reservations.get(problem.ticket_id, call)) is not None
        )

    def runs_unseen(self, ticket_id: str, attempt: int) -> bool:
        known = self.model[ticket_id]
        running = known.state == "running" and known.attempt == attempt
        return running and not self.state.reservations.calls(ticket_id)

    @precondition(lambda self: self.version * B <= 6 + self.counted())
    @rule(target=orders)
    def rollout_begins(self) -> object:
        """Publish a version, and every server that may begins with it, or drains for it; some never end."""
        self.publish()
        orders = [self.order(int(name[-1])) for name in list(self.servers)]
        return multiple(*(order for order in orders if isinstance(order, UpdateOrder)))

    @rule(order=consumes(orders), success=st.booleans())
    def update_ends(self, order: UpdateOrder, success: bool) -> None:
        """Possibly long after a newer version was published, or after the server was replaced."""
        truth = self.servers.get(order.server)
        current = truth is not None and truth.address.incarnation == order.incarnation
        if success:
            assert self.state.servers.succeeded(order, 0.1, {}) == current
        else:
            assert self.state.servers.failed(order, "disk on fire", self.now) == current
        if truth is not None and current:
            truth.draining, truth.began = False, None
            if (
                order.target.incarnation != self.trainer_incarnation
            ):  # it began before training started again: proves nothing
                truth.version = None if success else truth.version
            elif success:
                truth.version = order.target.version
                self.proved(truth)

    def proved(self, truth: Truth) -> None:
        truth.trusted, truth.reporters = True, set()

    @rule(index=SERVERS, answers=st.booleans(), restarted=st.booleans())
    def probe(self, index: int, answers: bool, restarted: bool) -> None:
        """The due probe of a server. ``restarted``: it answers, with other weights than it had."""
        truth = self.servers.get(f"generation_server/{index}")
        if truth is None:
            return
        name = truth.address.name
        probe = self.state.servers.next_probe(name, truth.address.incarnation, self.now)
        if not isinstance(probe, Probe):
            assert truth.trusted or self.state.servers.get(name).health.probe_at > self.now  # type: ignore[union-attr]
            return
        if not answers:
            assert self.state.servers.silent(probe, "timeout", self.now)
            truth.trusted, truth.reporters = False, set()
            return
        truth.version = None if restarted else truth.version
        published = self.published(-1 if truth.version is None else truth.version)
        self.state.servers.answered(probe, str(published.version), published.locator, self.now)
        self.proved(truth)

    @rule()
    def all_servers_update(self) -> None:
        """However they are paced: if none of them hangs, every server that serves gets there without the clock."""
        hanging = any(self.holds_slot(truth) for truth in self.servers.values())
        for _ in range(len(self.servers)):
            for name in list(self.servers):
                order = self.order(int(name[-1]))
                if isinstance(order, UpdateOrder):
                    self.update_ends(order, True)
        if self.settings.interruptible and not hanging:
            kept = self.state.servers.holds  # for an evaluation
            due = {s.name for s in self.state.servers.all() if s.retry_at <= self.now and s.name not in kept}
            assert all(t.version == self.version for n, t in self.servers.items() if t.trusted and n in due)

    # -- workers and the clock -----------------------------------------------------------------------------------------

    @rule(index=WORKERS)
    def worker_starts(self, index: int) -> None:
        """Also a restart, seen only as a new incarnation."""
        self.births += 1
        self.lose_worker(f"rollout_worker/{index}", str(self.births))

    @precondition(lambda self: len(self.workers) > 1)
    @rule(index=WORKERS)
    def worker_dies(self, index: int) -> None:
        self.lose_worker(f"rollout_worker/{index}", None)

    def lose_worker(self, name: str, incarnation: str | None) -> None:
        held = {i for i, known in self.model.items() if known.state == "running" and known.worker == name}
        self.workers.pop(name, None)
        if incarnation is not None:
            self.workers[name] = incarnation
        self.observe_workers()
        assert all(self.model[ticket_id].state == "waiting" for ticket_id in held)

    @rule(seconds=st.sampled_from([1.0, 20.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        lapsed = {i for i, k in self.model.items() if k.state == "running" and self.now - k.news > LEASE_S}
        lost = self.state.expire(self.now)
        assert {ticket_id for ticket_id in lost if not ticket_id.startswith("eval-")} == lapsed
        self.mark_lost(lost)
        self.commit()
