"""Evidence about servers: the transition table, and every short history of reports, probes and updates."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest

from realsys.manager.ledger.staleness import StalenessBound
from realsys.manager.routing.health import TRANSITIONS, BlameRules, Health, Reports
from realsys.manager.routing.servers import Pace, Probe, ServerRegistry, UpdateOrder
from tests.support.ledger.manager_states import address, version
from tests.support.ledger.state_explorer import Canonical, Copier, Violation, explore

SERVERS, WORKERS, FAULTS = 2, ("a", "b", "c"), 4
RULES = BlameRules(window_s=30.0, reporters=2, wrong=2)


def test_only_evidence_leads_into_quarantine() -> None:
    into = {event for (before, event), after in TRANSITIONS.items() if before != after == "quarantined"}
    assert into == {"accused", "silent"}


def test_impossible_event_names_server_and_state() -> None:
    with pytest.raises(ValueError, match="server s: event 'answered' is not possible while it is healthy"):
        Health("s").apply("answered")


def test_reports_outside_the_window_do_not_count() -> None:
    reports = Reports(RULES)
    assert [reports.add("a", "s", 0.0), reports.add("b", "s", 30.0)] == ["reported", "reported"]
    assert reports.add("c", "s", 31.0) == "accused"


def test_suspect_is_heard_again_after_the_window() -> None:
    reports = Reports(RULES)
    for server in ("s", "t"):
        reports.add("a", server, 0.0)
        suspects = reports.answered(server, 1.0)
    assert suspects == ["a"] == list(reports.suspects(2.0))
    assert reports.add("a", "u", 29.0) == "ignored" and reports.add("a", "u", 30.0) == "reported"


def test_right_report_does_not_count_against_worker() -> None:
    reports = Reports(RULES)
    for server in ("s", "t", "u"):
        assert reports.add("a", server, 0.0) == "reported"
        reports.discard(server)  # it did not answer
    assert reports.suspects(0.0) == {}


@dataclass(frozen=True)
class Act:
    """Something that happens to a server."""

    name: str
    server: int
    worker: str = ""
    cost: int = 0


class World:
    """Two servers at version 0 with version 1 published, and workers that report as they like.

    No time passes, so that every report counts, and every probe is due whenever it runs.
    """

    def __init__(self) -> None:
        self.servers = ServerRegistry(StalenessBound(2, 1), Pace(), RULES)
        self.servers.observe([address(index) for index in range(SERVERS)])
        self.servers.publish(version(0))
        for index in range(SERVERS):
            order = self._order(index)
            assert order is not None and self.servers.succeeded(order, 0.1, {})
        self.servers.publish(version(1))
        self.alive = [True] * SERVERS
        self.reporters: list[set[str]] = [set() for _ in range(SERVERS)]
        self.faults = 0

    def _order(self, index: int) -> UpdateOrder | None:
        made = self.servers.next_order(address(index).name, "1", 1e9)
        return made if isinstance(made, UpdateOrder) else None

    def _probe(self, index: int) -> Probe | None:
        made = self.servers.next_probe(address(index).name, "1", 1e9)
        return made if isinstance(made, Probe) else None

    def enabled(self) -> list[Act]:
        acts = [Act("reports", i, w, 1) for i, w in product(range(SERVERS), WORKERS)] if self.faults < FAULTS else []
        for index in range(SERVERS):
            if self.faults < FAULTS:
                acts.append(Act("hangs" if self.alive[index] else "revives", index, cost=1))
            acts += [Act("is_probed", index)] if self._probe(index) else []
            acts += [Act("updates", index)] if self._order(index) else []
        return acts + [Act("revives", i) for i in range(SERVERS) if not self.alive[i]]

    def apply(self, act: Act) -> None:
        self.faults += act.cost
        getattr(self, f"_{act.name}")(act)

    def _hangs(self, act: Act) -> None:
        self.alive[act.server] = False

    def _revives(self, act: Act) -> None:
        self.alive[act.server] = True

    def _reports(self, act: Act) -> None:
        name = address(act.server).name
        server = self.servers.get(name)
        assert server is not None
        was = server.quarantined
        self.servers.report(name, server.health.epoch, act.worker, "reset", 0.0)
        self.reporters[act.server].add(act.worker)
        if server.quarantined and not was:
            assert len(self.reporters[act.server]) >= RULES.reporters, "one worker's word has removed a server"

    def _is_probed(self, act: Act) -> None:
        probe = self._probe(act.server)
        assert probe is not None
        server = self.servers.get(probe.server)
        assert server is not None and server.verified is not None
        if self.alive[act.server]:
            verified = server.verified
            self.servers.answered(probe, str(verified.version), verified.locator, 0.0)
            assert server.health.state == "healthy" and server.verified == verified, "no update is needed"
        else:
            assert self.servers.silent(probe, "timeout", 0.0) and server.quarantined

    def _updates(self, act: Act) -> None:
        order = self._order(act.server)
        assert order is not None
        server = self.servers.get(order.server)
        assert server is not None
        routable = self.servers.trusts(server)
        self.servers.started(order, 0.0)
        if self.alive[act.server]:
            assert self.servers.succeeded(order, 0.1, {}) and self.servers.trusts(server)
        else:
            assert self.servers.failed(order, "timeout", 0.0) and self.servers.trusts(server) == routable

    def check(self) -> None:
        for server in self.servers.all():
            assert self.servers.trusts(server) == (not server.quarantined), "all have a version within the bound"
        assert self.servers.in_use()[-1] == 1

    def is_final(self) -> bool:
        """Every server is healthy at the newest version, though the workers may still report."""
        return all(s.state == "ready" and s.verified == self.servers.published for s in self.servers.all())

    def key(self) -> bytes:
        rows = [(s.health.state, s.verified and s.verified.version) for s in self.servers.all()]
        reports = {worker: sorted(names) for worker, names in self._rows().items()}
        return Canonical({}).digest((rows, reports, self.alive, self.reporters, self.faults))

    def _rows(self) -> dict[str, list[tuple[str, bool]]]:
        rows = self.servers.reports._by_worker
        return {worker: [(name, row.wrong) for name, row in by.items()] for worker, by in rows.items()}


def test_no_history_of_reports_breaks_a_rule() -> None:
    found = explore(World(), Copier(StalenessBound, Pace, BlameRules), at_most=500_000)
    assert {"reports", "hangs", "revives", "is_probed", "updates"} <= found.actions.keys()


def test_exploration_finds_quarantine_by_one_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reports, "add", lambda *_: "accused")
    with pytest.raises(Violation, match="one worker's word has removed a server"):
        explore(World(), Copier(StalenessBound, Pace, BlameRules), at_most=500_000)
