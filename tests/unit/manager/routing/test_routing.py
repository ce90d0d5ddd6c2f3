"""Which server gets a request, which host reads weights from which, and when a server is out."""

from collections import Counter
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.manager.ledger.staleness import StalenessBound
from realsys.manager.messages import BLOCK, MAX_BLOCKS, prefix_hashes
from realsys.manager.routing.health import TRANSITIONS, BlameRules, Health, Reports
from realsys.manager.routing.placement import (
    STRATEGIES,
    ExpectedLength,
    LoadGate,
    PrefixAware,
    Reservation,
    Reservations,
    RouteRequest,
    ServerLoad,
    make_strategy,
)
from realsys.manager.routing.servers import FanOut, Idle, Pace, Probe, ServerRegistry, UpdateOrder
from realsys.types import PublishedVersion, ServerAddress
from tests.support.ledger.manager_states import address, version
from tests.support.ledger.state_explorer import Canonical, Copier, Violation, explore

REQUEST = RouteRequest("t", sequences=4, tokens=100)


def servers(**tokens):
    return [ServerLoad(name, version=1, requests=load // 10, tokens=load) for name, load in tokens.items()]


def test_round_robin_takes_each_server_in_turn():
    strategy = make_strategy("round_robin")
    assert [strategy.choose(REQUEST, servers(b=0, a=9, c=5)) for _ in range(4)] == ["a", "b", "c", "a"]
    assert [strategy.choose(REQUEST, servers(a=0, c=0)) for _ in range(3)] == ["c", "a", "c"]


def test_least_loaded_by_requests_and_by_tokens():
    few_long, many_short = ServerLoad("few_long", 1, 2, 5000), ServerLoad("many_short", 1, 50, 100)
    assert make_strategy("least_requests").choose(REQUEST, [few_long, many_short]) == "few_long"
    assert make_strategy("least_tokens").choose(REQUEST, [few_long, many_short]) == "many_short"


def test_sticky_stays_with_its_prefix_inside_the_gate():
    strategy = make_strategy("sticky")
    held = RouteRequest("t", 4, 100, previous="a", previous_version=1)
    assert strategy.choose(held, servers(a=390, b=0)) == "a"
    assert strategy.choose(held, servers(a=5000, b=4000)) == "a"


def test_sticky_leaves_an_overloaded_server():
    held = RouteRequest("t", 4, 100, previous="a", previous_version=1)
    assert make_strategy("sticky").choose(held, servers(a=5000, b=1000)) == "b"


def test_sticky_places_anew_after_update_or_loss():
    strategy = make_strategy("sticky")
    assert strategy.choose(RouteRequest("t", 4, 100, "a", previous_version=0), servers(a=100, b=0)) == "b"
    assert strategy.choose(RouteRequest("t", 4, 100, "gone", previous_version=1), servers(a=100, b=0)) == "b"


def test_next_turn_stays_while_its_keys_are_in_the_bound():
    for served, server in ((5, "a"), (4, "a"), (3, "b"), (6, "b")):  # 6: the trainer has gone back
        held = RouteRequest("t", 4, 100, previous="a", previous_version=served, reuse_versions=1)
        loads = [ServerLoad("a", version=5, tokens=100), ServerLoad("b", version=5)]
        assert make_strategy("sticky").choose(held, loads) == server


def sent(prefix, *, previous=None):
    return RouteRequest("t", 1, 100, previous, 1 if previous else None, prefix)


def test_prefix_chooses_server_with_longest_match():
    strategy = PrefixAware()
    assert strategy.choose(sent([1, 2, 3]), servers(a=0, b=50)) == "a"
    assert strategy.choose(sent([1, 9]), servers(a=300, b=0)) == "a", "shares the first block only, inside the gate"
    assert strategy.choose(sent([7]), servers(a=300, b=0)) == "b"
    assert strategy.choose(sent([7, 8]), servers(a=0, b=300)) == "b"
    assert strategy.choose(sent([1, 2, 3]), servers(a=300, b=0)) == "a"


def test_popular_prefix_spreads_beyond_the_gate():
    strategy = PrefixAware(LoadGate(ratio=1.5, slack=4.0))
    assert strategy.choose(sent([1]), servers(a=0, b=1000)) == "a"
    assert strategy.choose(sent([1]), servers(a=1901, b=1000)) == "b", "1.5 * 1000 + 4 * 100 = 1900"
    assert strategy.choose(sent([1]), servers(a=1000, b=1900)) == "a", "now both hold it: the less loaded one"


def test_prefix_computed_with_other_weights_counts_for_nothing():
    strategy = PrefixAware()
    assert strategy.choose(sent([1]), servers(a=0, b=50)) == "a"
    updated = [ServerLoad("a", version=2, tokens=100), ServerLoad("b", version=1, tokens=0)]
    assert strategy.choose(sent([1]), updated) == "b"


def test_prefix_strategy_keeps_ticket_on_its_server():
    strategy = PrefixAware()
    assert strategy.choose(sent([1]), servers(a=0, b=50)) == "a"
    assert strategy.choose(sent([1], previous="b"), servers(a=0, b=50)) == "b"


def test_prefix_strategy_forgets_the_oldest_beyond_its_capacity():
    strategy = PrefixAware(capacity=2)
    for prefix in ([1], [2], [1], [3]):  # 2 is the one not used for longest
        strategy.choose(sent(prefix), servers(a=0, b=50))
    assert strategy.choose(sent([2]), servers(a=100, b=50)) == "b"
    assert strategy.choose(sent([3]), servers(a=100, b=50)) == "a"


def test_prompts_share_hashes_of_shared_blocks():
    first, second = [*range(3 * BLOCK + 5)], [*range(2 * BLOCK), *range(5000, 5000 + BLOCK + 5)]
    one, other = prefix_hashes(first), prefix_hashes(second)
    assert len(one) == len(other) == 4, "three blocks and the whole"
    assert one[:2] == other[:2] and not set(one[2:]) & set(other[2:])
    assert prefix_hashes(first) == one and prefix_hashes(first[: 2 * BLOCK]) == one[:2]
    assert len(prefix_hashes([1])) == 1 and len(prefix_hashes([7] * 10**5)) == MAX_BLOCKS + 1


@pytest.mark.parametrize("name", STRATEGIES)
@given(loads=st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 10**6), min_size=1, max_size=6))
def test_every_strategy_chooses_one_of_the_servers(name, loads):
    assert make_strategy(name).choose(REQUEST, servers(**loads)) in loads


def test_sticky_spreads_a_burst_evenly():
    strategy, reservations = make_strategy("sticky"), Reservations()
    for number in range(40):
        loads = [ServerLoad(name, 1, *reservations.load(name)) for name in "abcd"]
        chosen = strategy.choose(RouteRequest(str(number), 1, 100), loads)
        reservations.reserve(str(number), Reservation(chosen, 1, 100, 1, 0))
    assert Counter(reservations.load(name)[0] for name in "abcd") == {10: 4}


def test_reservation_is_released_exactly_once():
    reservations = Reservations()
    reservations.reserve("t", Reservation("a", 4, 100, 1, 0))
    reservations.reserve("t", Reservation("b", 4, 100, 1, 0))
    assert reservations.load("a") == (0, 0) and reservations.load("b") == (4, 100)
    assert reservations.release("t") == [Reservation("b", 4, 100, 1, 0)]
    assert reservations.release("t") == []
    assert reservations.load("b") == (0, 0) and len(reservations) == 0


def test_death_of_a_server_releases_all_its_places():
    reservations = Reservations()
    for number in range(3):
        reservations.reserve(f"a{number}", Reservation("a", 1, 10, 1, 0))
    reservations.reserve("b0", Reservation("b", 1, 10, 1, 0))
    assert reservations.release_server("a") == 3
    assert reservations.release("a1") == []
    assert reservations.load("a") == (0, 0) and reservations.load("b") == (1, 10) and len(reservations) == 1


def test_calls_of_a_ticket_are_placed_separately():
    reservations = Reservations()
    reservations.reserve("t", Reservation("a", 1, 10, 1, 0), "0.0")
    reservations.reserve("t", Reservation("b", 1, 20, 1, 0), "1.0")
    reservations.reserve("t", Reservation("b", 1, 30, 1, 0), "0.0")
    assert reservations.load("b") == (2, 50) and reservations.load("a") == (0, 0)
    assert reservations.release_call("t", "1.0") is not None and reservations.release_call("t", "1.0") is None
    assert reservations.calls("t") == ["0.0"] and reservations.load("b") == (1, 30)
    reservations.reserve("t", Reservation("a", 1, 10, 1, 0), "0.1")
    assert len(reservations.release("t")) == 2 and len(reservations) == 0 and reservations.load("b") == (0, 0)


def placed(reservations, server, ticket, sequences, now):
    reservations.reserve(ticket, Reservation(server, sequences, 10 * sequences, 1, 0, now))


def test_report_counts_what_ended_in_a_call():
    """A group of 16 of which one still runs is one sequence, and its end removes one."""
    reservations = Reservations()
    placed(reservations, "a", "t", 16, now=0.0)
    load = reservations.live("a", 1)
    reservations.report("a", sequences=1, tokens=500, asked=5.0)
    assert (load.requests, load.tokens) == (1, 500) and reservations.load("a") == (16, 160)
    reservations.release("t")
    assert (load.requests, load.tokens) == (0, 0)


def test_call_placed_after_the_question_is_added():
    """Its request may not have arrived at the server, so the report does not contain it."""
    reservations = Reservations()
    placed(reservations, "a", "old", 2, now=0.0)
    placed(reservations, "a", "new", 4, now=5.0)
    reservations.report("a", sequences=2, tokens=100, asked=5.0)
    load = reservations.live("a", 1)
    assert (load.requests, load.tokens) == (6, 140)
    reservations.release("new")
    reservations.release("old")
    assert (load.requests, load.tokens) == (0, 0)


def test_reported_calls_of_an_earlier_manager_stay():
    reservations = Reservations()
    placed(reservations, "a", "t", 2, now=0.0)
    reservations.report("a", sequences=100, tokens=5000, asked=1.0)
    reservations.release("t")
    assert reservations.live("a", 1).requests == 98 and len(reservations) == 0


@given(
    steps=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 20), st.integers(0, 99)), max_size=40
    )
)
def test_load_is_never_negative(steps):
    """``now`` and the question of a report differ by up to two steps."""
    reservations = Reservations()
    for now, (ticket, sequences, reported, tokens) in enumerate(steps):
        if sequences:
            placed(reservations, "s", ticket, sequences, now=float(now))
        else:
            reservations.release(ticket)
        if tokens % 3 == 0:
            reservations.report("s", reported, tokens * bool(reported), asked=now - tokens % 2)
        load = reservations.live("s", 1)
        assert load.requests > -1e-9 and load.tokens > -1e-9
    for ticket in "abc":
        reservations.release(ticket)
    assert reservations.load("s") == (0, 0)


def test_expected_length_follows_the_last_completions():
    lengths = ExpectedLength(window=4)
    assert lengths.within(1000) == 1000, "nothing has ended"
    lengths.add([100] * 4)
    assert lengths.within(1000) == 100 and lengths.within(30) == 30
    lengths.add([500] * 50)
    assert lengths.within(1000) == pytest.approx(500, rel=0.01)


def test_expected_length_weighs_sequences_against_cached_tokens():
    """Ten sequences that have begun, or two long ones: if completions are short, the ten end soon."""
    ten, two = ServerLoad("ten", 1, 10, 1000), ServerLoad("two", 1, 2, 9000)
    for expected, least in ((100.0, "ten"), (5000.0, "two")):
        request = RouteRequest("t", 1, 100, expected=expected)
        assert make_strategy("least_tokens").choose(request, [ten, two]) == least


# ---- Which server reads a version from storage, and which from a host that has it


VERSION, NEWER = PublishedVersion(1, "t", "/v1", 1), PublishedVersion(2, "t", "/v2", 2)
PATIENCE_S = 60.0


class Hosts:
    """Servers named host/number, all of which must be updated. ``orders``: the last update of each that was begun."""

    def __init__(self, names, storage_readers, *, copies=True):
        self.now = 0.0
        self.orders: dict[str, UpdateOrder] = {}
        self._running: set[str] = set()
        self.registry = ServerRegistry(StalenessBound(2, 1), Pace(), fan_out=FanOut(storage_readers, PATIENCE_S))
        addresses = []
        for name in names:
            host = name.partition("/")[0]
            addresses.append(ServerAddress(name, f"http://{name}", 1, host, "1", f"http://{host}" if copies else ""))
        self.registry.observe(addresses)
        self.registry.publish(VERSION)

    def decide(self):
        """Let the due servers decide. Returns server -> source of those that begin now; "": storage."""
        begun = {}
        while self.registry.due:
            name = min(self.registry.due)
            self.registry.due.remove(name)
            order = self.registry.next_order(name, "1", self.now)
            if isinstance(order, UpdateOrder) and name not in self._running:
                self.registry.started(order, self.now)
                self._running.add(name)
                self.orders[name] = order
                begun[name] = next(iter(order.sources), "")
        return begun

    def publish(self, version):
        self.registry.publish(version)

    def succeed(self, name):
        self._running.remove(name)
        self.registry.succeeded(self.orders[name], 1.0, {})

    def fail(self, name):
        self._running.remove(name)
        self.registry.failed(self.orders.pop(name), "no", self.now)


def test_without_fan_out_all_read_storage():
    assert Hosts(["a/0", "b/0"], 0).decide() == {"a/0": "", "b/0": ""}
    assert Hosts(["a/0", "b/0"], 1, copies=False).decide() == {"a/0": "", "b/0": ""}


def test_waiting_hosts_read_from_those_that_have_it():
    hosts = Hosts([f"{name}/0" for name in "abcdef"], 1)
    assert hosts.decide() == {"a/0": ""}
    hosts.succeed("a/0")
    assert hosts.decide() == {"b/0": "http://a", "c/0": ""}
    hosts.succeed("b/0")
    assert sorted(hosts.decide().values()) == ["http://a", "http://b"], "c still reads storage, the others send"


def test_servers_of_one_host_begin_together():
    """The second shares the copy of the first, and costs neither storage nor another host anything."""
    hosts = Hosts(["a/0", "a/1", "b/0", "b/1"], 1)
    assert hosts.decide() == {"a/0": "", "a/1": ""}
    hosts.succeed("a/1")
    assert hosts.decide()["b/0"] == "http://a"


def test_failed_reader_frees_its_place():
    hosts = Hosts(["a/0", "b/0", "c/0"], 1)
    hosts.decide()
    hosts.fail("a/0")
    assert hosts.decide() == {"b/0": ""}


def test_reader_that_hangs_is_replaced_by_one():
    """All waiting hosts together would take the storage from each other, and from a reader that is only slow."""
    hosts = Hosts(["a/0", "b/0", "c/0", "d/0"], 1)
    hosts.decide()
    assert hosts.registry.next_order("b/0", "1", 10.0) == Idle(PATIENCE_S)
    hosts.now = PATIENCE_S
    hosts.registry.due.update(["b/0", "c/0", "d/0"])
    assert hosts.decide() == {"b/0": ""}
    assert hosts.registry.next_order("c/0", "1", PATIENCE_S) == Idle(2 * PATIENCE_S)


def test_sender_stages_no_newer_version_meanwhile():
    """Its copy would change under the host that reads it, which would read the rest from the storage."""
    hosts = Hosts(["a/0", "b/0", "c/0"], 1)
    hosts.decide()
    hosts.succeed("a/0")
    assert hosts.decide() == {"b/0": "http://a", "c/0": ""}
    hosts.publish(NEWER)
    assert hosts.decide() == {} and hosts.registry.next_order("a/0", "1", 0.0) == Idle(PATIENCE_S)
    hosts.succeed("b/0")
    assert hosts.decide() == {"a/0": ""}
    hosts.succeed("c/0")
    hosts.succeed("a/0")
    assert hosts.decide() == {"b/0": "http://a", "c/0": ""}


def test_free_host_begins_while_another_sends():
    hosts = Hosts(["a/0", "b/0", "c/0"], 1)
    hosts.decide()
    hosts.succeed("a/0")
    hosts.decide()
    hosts.publish(NEWER)
    hosts.decide()
    hosts.succeed("c/0")
    assert hosts.decide() == {"c/0": ""}, "a sends to b"


def test_transfer_that_hangs_delays_its_sender_once():
    hosts = Hosts(["a/0", "b/0"], 1)
    hosts.decide()
    hosts.succeed("a/0")
    hosts.decide()
    hosts.publish(NEWER)
    hosts.now = PATIENCE_S
    assert hosts.decide() == {"a/0": ""}


def test_silent_host_is_no_source():
    hosts = Hosts(["a/0", "b/0", "c/0"], 1)
    hosts.decide()
    hosts.succeed("a/0")
    server = hosts.registry.get("a/0")
    server.health.apply("update_failed", 0.0)
    probe = hosts.registry.next_probe("a/0", "1", 0.0)
    assert hosts.registry.silent(probe, "no answer", 0.0)  # type: ignore[arg-type]
    assert hosts.decide() == {"b/0": ""}


def test_64_hosts_have_it_in_eight_copies():
    """The time of a copy is that of the storage and of a link: 1 s for 1 GB at 1 GB/s. Storage alone takes 64 s."""
    hosts, rounds, reads = Hosts([f"{number:02d}/0" for number in range(64)], 1), 0, 0
    while begun := hosts.decide():
        rounds += 1
        reads += sum(not source for source in begun.values())
        senders = [source for source in begun.values() if source]
        assert len(set(senders)) == len(senders), "a host sends to one host at a time"
        for name in begun:
            hosts.succeed(name)
    assert len(hosts.orders) == 64
    assert rounds <= 8 and reads <= rounds


# ---- Evidence about servers: the transition table, and every short history of reports, probes and updates


SERVERS, WORKERS, FAULTS = 2, ("a", "b", "c"), 4
RULES = BlameRules(window_s=30.0, reporters=2, wrong=2)


def test_only_evidence_leads_into_quarantine():
    into = {event for (before, event), after in TRANSITIONS.items() if before != after == "quarantined"}
    assert into == {"accused", "silent"}


def test_impossible_event_names_server_and_state():
    with pytest.raises(ValueError, match="server s: event 'answered' is not possible while it is healthy"):
        Health("s").apply("answered")


def test_reports_outside_the_window_do_not_count():
    reports = Reports(RULES)
    assert [reports.add("a", "s", 0.0), reports.add("b", "s", 30.0)] == ["reported", "reported"]
    assert reports.add("c", "s", 31.0) == "accused"


def test_suspect_is_heard_again_after_the_window():
    reports = Reports(RULES)
    for server in ("s", "t"):
        reports.add("a", server, 0.0)
        suspects = reports.answered(server, 1.0)
    assert suspects == ["a"] == list(reports.suspects(2.0))
    assert reports.add("a", "u", 29.0) == "ignored" and reports.add("a", "u", 30.0) == "reported"


def test_right_report_does_not_count_against_worker():
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

    def __init__(self):
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

    def _order(self, index):
        made = self.servers.next_order(address(index).name, "1", 1e9)
        return made if isinstance(made, UpdateOrder) else None

    def _probe(self, index):
        made = self.servers.next_probe(address(index).name, "1", 1e9)
        return made if isinstance(made, Probe) else None

    def enabled(self):
        acts = [Act("reports", i, w, 1) for i, w in product(range(SERVERS), WORKERS)] if self.faults < FAULTS else []
        for index in range(SERVERS):
            if self.faults < FAULTS:
                acts.append(Act("hangs" if self.alive[index] else "revives", index, cost=1))
            acts += [Act("is_probed", index)] if self._probe(index) else []
            acts += [Act("updates", index)] if self._order(index) else []
        return acts + [Act("revives", i) for i in range(SERVERS) if not self.alive[i]]

    def apply(self, act):
        self.faults += act.cost
        getattr(self, f"_{act.name}")(act)

    def _hangs(self, act):
        self.alive[act.server] = False

    def _revives(self, act):
        self.alive[act.server] = True

    def _reports(self, act):
        name = address(act.server).name
        server = self.servers.get(name)
        was = server.quarantined
        self.servers.report(name, server.health.epoch, act.worker, "reset", 0.0)
        self.reporters[act.server].add(act.worker)
        if server.quarantined and not was:
            assert len(self.reporters[act.server]) >= RULES.reporters, "one worker's word has removed a server"

    def _is_probed(self, act):
        probe = self._probe(act.server)
        server = self.servers.get(probe.server)
        assert server is not None and server.verified is not None
        if self.alive[act.server]:
            verified = server.verified
            self.servers.answered(probe, str(verified.version), verified.locator, 0.0)
            assert server.health.state == "healthy" and server.verified == verified, "no update is needed"
        else:
            assert self.servers.silent(probe, "timeout", 0.0) and server.quarantined

    def _updates(self, act):
        order = self._order(act.server)
        server = self.servers.get(order.server)
        assert server is not None
        routable = self.servers.trusts(server)
        self.servers.started(order, 0.0)
        if self.alive[act.server]:
            assert self.servers.succeeded(order, 0.1, {}) and self.servers.trusts(server)
        else:
            assert self.servers.failed(order, "timeout", 0.0) and self.servers.trusts(server) == routable

    def check(self):
        for server in self.servers.all():
            assert self.servers.trusts(server) == (not server.quarantined), "all have a version within the bound"
        assert self.servers.in_use()[-1] == 1

    def is_final(self):
        """Every server is healthy at the newest version, though the workers may still report."""
        return all(s.state == "ready" and s.verified == self.servers.published for s in self.servers.all())

    def key(self):
        rows = [(s.health.state, s.verified and s.verified.version) for s in self.servers.all()]
        reports = {worker: sorted(names) for worker, names in self._rows().items()}
        return Canonical({}).digest((rows, reports, self.alive, self.reporters, self.faults))

    def _rows(self):
        rows = self.servers.reports._by_worker
        return {worker: [(name, row.wrong) for name, row in by.items()] for worker, by in rows.items()}


def test_no_history_of_reports_breaks_a_rule():
    found = explore(World(), Copier(StalenessBound, Pace, BlameRules), at_most=500_000)
    assert {"reports", "hangs", "revives", "is_probed", "updates"} <= found.actions.keys()


def test_exploration_finds_quarantine_by_one_report(monkeypatch):
    monkeypatch.setattr(Reports, "add", lambda *_: "accused")
    with pytest.raises(Violation, match="one worker's word has removed a server"):
        explore(World(), Copier(StalenessBound, Pace, BlameRules), at_most=500_000)
