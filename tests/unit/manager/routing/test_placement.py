"""Routing strategies, names of prefixes, reservations."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.manager.routing.placement import (
    BLOCK,
    MAX_BLOCKS,
    STRATEGIES,
    ExpectedLength,
    LoadGate,
    PrefixAware,
    Reservation,
    Reservations,
    RouteRequest,
    ServerLoad,
    make_strategy,
    prefix_hashes,
)

REQUEST = RouteRequest("t", sequences=4, tokens=100)


def servers(**tokens: int) -> list[ServerLoad]:
    return [ServerLoad(name, version=1, requests=load // 10, tokens=load) for name, load in tokens.items()]


def test_round_robin_takes_each_server_in_turn() -> None:
    strategy = make_strategy("round_robin")
    assert [strategy.choose(REQUEST, servers(b=0, a=9, c=5)) for _ in range(4)] == ["a", "b", "c", "a"]
    assert [strategy.choose(REQUEST, servers(a=0, c=0)) for _ in range(3)] == ["c", "a", "c"]


def test_least_loaded_by_requests_and_by_tokens() -> None:
    few_long, many_short = ServerLoad("few_long", 1, 2, 5000), ServerLoad("many_short", 1, 50, 100)
    assert make_strategy("least_requests").choose(REQUEST, [few_long, many_short]) == "few_long"
    assert make_strategy("least_tokens").choose(REQUEST, [few_long, many_short]) == "many_short"


def test_sticky_stays_with_its_prefix_inside_the_gate() -> None:
    strategy = make_strategy("sticky")
    held = RouteRequest("t", 4, 100, previous="a", previous_version=1)
    assert strategy.choose(held, servers(a=390, b=0)) == "a"
    assert strategy.choose(held, servers(a=5000, b=4000)) == "a"


def test_sticky_leaves_an_overloaded_server() -> None:
    held = RouteRequest("t", 4, 100, previous="a", previous_version=1)
    assert make_strategy("sticky").choose(held, servers(a=5000, b=1000)) == "b"


def test_sticky_places_anew_after_update_or_loss() -> None:
    strategy = make_strategy("sticky")
    assert strategy.choose(RouteRequest("t", 4, 100, "a", previous_version=0), servers(a=100, b=0)) == "b"
    assert strategy.choose(RouteRequest("t", 4, 100, "gone", previous_version=1), servers(a=100, b=0)) == "b"


def test_next_turn_stays_while_its_keys_are_in_the_bound() -> None:
    for version, server in ((5, "a"), (4, "a"), (3, "b"), (6, "b")):  # 6: the trainer has gone back
        held = RouteRequest("t", 4, 100, previous="a", previous_version=version, reuse_versions=1)
        loads = [ServerLoad("a", version=5, tokens=100), ServerLoad("b", version=5)]
        assert make_strategy("sticky").choose(held, loads) == server


def sent(prefix: list[int], *, previous: str | None = None) -> RouteRequest:
    return RouteRequest("t", 1, 100, previous, 1 if previous else None, prefix)


def test_prefix_chooses_server_with_longest_match() -> None:
    strategy = PrefixAware()
    assert strategy.choose(sent([1, 2, 3]), servers(a=0, b=50)) == "a"
    assert strategy.choose(sent([1, 9]), servers(a=300, b=0)) == "a", "shares the first block only, inside the gate"
    assert strategy.choose(sent([7]), servers(a=300, b=0)) == "b"
    assert strategy.choose(sent([7, 8]), servers(a=0, b=300)) == "b"
    assert strategy.choose(sent([1, 2, 3]), servers(a=300, b=0)) == "a"


def test_popular_prefix_spreads_beyond_the_gate() -> None:
    strategy = PrefixAware(LoadGate(ratio=1.5, slack=4.0))
    assert strategy.choose(sent([1]), servers(a=0, b=1000)) == "a"
    assert strategy.choose(sent([1]), servers(a=1901, b=1000)) == "b", "1.5 * 1000 + 4 * 100 = 1900"
    assert strategy.choose(sent([1]), servers(a=1000, b=1900)) == "a", "now both hold it: the less loaded one"


def test_prefix_computed_with_other_weights_counts_for_nothing() -> None:
    strategy = PrefixAware()
    assert strategy.choose(sent([1]), servers(a=0, b=50)) == "a"
    updated = [ServerLoad("a", version=2, tokens=100), ServerLoad("b", version=1, tokens=0)]
    assert strategy.choose(sent([1]), updated) == "b"


def test_prefix_strategy_keeps_ticket_on_its_server() -> None:
    strategy = PrefixAware()
    assert strategy.choose(sent([1]), servers(a=0, b=50)) == "a"
    assert strategy.choose(sent([1], previous="b"), servers(a=0, b=50)) == "b"


def test_prefix_strategy_forgets_the_oldest_beyond_its_capacity() -> None:
    strategy = PrefixAware(capacity=2)
    for prefix in ([1], [2], [1], [3]):  # 2 is the one not used for longest
        strategy.choose(sent(prefix), servers(a=0, b=50))
    assert strategy.choose(sent([2]), servers(a=100, b=50)) == "b"
    assert strategy.choose(sent([3]), servers(a=100, b=50)) == "a"


def test_prompts_share_hashes_of_shared_blocks() -> None:
    first, second = [*range(3 * BLOCK + 5)], [*range(2 * BLOCK), *range(5000, 5000 + BLOCK + 5)]
    one, other = prefix_hashes(first), prefix_hashes(second)
    assert len(one) == len(other) == 4, "three blocks and the whole"
    assert one[:2] == other[:2] and not set(one[2:]) & set(other[2:])
    assert prefix_hashes(first) == one and prefix_hashes(first[: 2 * BLOCK]) == one[:2]
    assert len(prefix_hashes([1])) == 1 and len(prefix_hashes([7] * 10**5)) == MAX_BLOCKS + 1


@pytest.mark.parametrize("name", STRATEGIES)
@given(loads=st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 10**6), min_size=1, max_size=6))
def test_every_strategy_chooses_one_of_the_servers(name: str, loads: dict[str, int]) -> None:
    assert make_strategy(name).choose(REQUEST, servers(**loads)) in loads


def test_sticky_spreads_a_burst_evenly() -> None:
    strategy, reservations = make_strategy("sticky"), Reservations()
    for number in range(40):
        loads = [ServerLoad(name, 1, *reservations.load(name)) for name in "abcd"]
        chosen = strategy.choose(RouteRequest(str(number), 1, 100), loads)
        reservations.reserve(str(number), Reservation(chosen, 1, 100, 1, 0))
    assert Counter(reservations.load(name)[0] for name in "abcd") == {10: 4}


def test_reservation_is_released_exactly_once() -> None:
    reservations = Reservations()
    reservations.reserve("t", Reservation("a", 4, 100, 1, 0))
    reservations.reserve("t", Reservation("b", 4, 100, 1, 0))
    assert reservations.load("a") == (0, 0) and reservations.load("b") == (4, 100)
    assert reservations.release("t") == [Reservation("b", 4, 100, 1, 0)]
    assert reservations.release("t") == []
    assert reservations.load("b") == (0, 0) and len(reservations) == 0


def test_death_of_a_server_releases_all_its_places() -> None:
    reservations = Reservations()
    for number in range(3):
        reservations.reserve(f"a{number}", Reservation("a", 1, 10, 1, 0))
    reservations.reserve("b0", Reservation("b", 1, 10, 1, 0))
    assert reservations.release_server("a") == 3
    assert reservations.release("a1") == []
    assert reservations.load("a") == (0, 0) and reservations.load("b") == (1, 10) and len(reservations) == 1


def test_calls_of_a_ticket_are_placed_separately() -> None:
    reservations = Reservations()
    reservations.reserve("t", Reservation("a", 1, 10, 1, 0), "0.0")
    reservations.reserve("t", Reservation("b", 1, 20, 1, 0), "1.0")
    reservations.reserve("t", Reservation("b", 1, 30, 1, 0), "0.0")
    assert reservations.load("b") == (2, 50) and reservations.load("a") == (0, 0)
    assert reservations.release_call("t", "1.0") is not None and reservations.release_call("t", "1.0") is None
    assert reservations.calls("t") == ["0.0"] and reservations.load("b") == (1, 30)
    reservations.reserve("t", Reservation("a", 1, 10, 1, 0), "0.1")
    assert len(reservations.release("t")) == 2 and len(reservations) == 0 and reservations.load("b") == (0, 0)


def placed(reservations: Reservations, server: str, ticket: str, sequences: int, now: float) -> None:
    reservations.reserve(ticket, Reservation(server, sequences, 10 * sequences, 1, 0, now))


def test_report_counts_what_ended_in_a_call() -> None:
    """A group of 16 of which one still runs is one sequence, and its end removes one."""
    reservations = Reservations()
    placed(reservations, "a", "t", 16, now=0.0)
    load = reservations.live("a", 1)
    reservations.report("a", sequences=1, tokens=500, asked=5.0)
    assert (load.requests, load.tokens) == (1, 500) and reservations.load("a") == (16, 160)
    reservations.release("t")
    assert (load.requests, load.tokens) == (0, 0)


def test_call_placed_after_the_question_is_added() -> None:
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


def test_reported_calls_of_an_earlier_manager_stay() -> None:
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
def test_load_is_never_negative(steps: list[tuple[str, int, int, int]]) -> None:
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


def test_expected_length_follows_the_last_completions() -> None:
    lengths = ExpectedLength(window=4)
    assert lengths.within(1000) == 1000, "nothing has ended"
    lengths.add([100] * 4)
    assert lengths.within(1000) == 100 and lengths.within(30) == 30
    lengths.add([500] * 50)
    assert lengths.within(1000) == pytest.approx(500, rel=0.01)


def test_expected_length_weighs_sequences_against_cached_tokens() -> None:
    """Ten sequences that have begun, or two long ones: if completions are short, the ten end soon."""
    ten, two = ServerLoad("ten", 1, 10, 1000), ServerLoad("two", 1, 2, 9000)
    for expected, least in ((100.0, "ten"), (5000.0, "two")):
        request = RouteRequest("t", 1, 100, expected=expected)
        assert make_strategy("least_tokens").choose(request, [ten, two]) == least
