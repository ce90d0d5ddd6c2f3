"""Routing strategies and reservations."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.admission.routing import (
    STRATEGIES,
    Reservation,
    Reservations,
    RouteRequest,
    ServerLoad,
    make_strategy,
)

REQUEST = RouteRequest("t", sequences=4, tokens=100)


def servers(**tokens: int) -> list[ServerLoad]:
    return [ServerLoad(name, version=1, requests=load // 10, tokens=load) for name, load in tokens.items()]


def test_round_robin_takes_each_in_turn_also_when_one_leaves() -> None:
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


def test_sticky_places_anew_after_an_update_or_a_loss_of_its_server() -> None:
    strategy = make_strategy("sticky")
    assert strategy.choose(RouteRequest("t", 4, 100, "a", previous_version=0), servers(a=100, b=0)) == "b"
    assert strategy.choose(RouteRequest("t", 4, 100, "gone", previous_version=1), servers(a=100, b=0)) == "b"


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
    assert reservations.release("t") is not None
    assert reservations.release("t") is None
    assert reservations.load("b") == (0, 0) and len(reservations) == 0


def test_death_of_a_server_releases_all_its_places() -> None:
    reservations = Reservations()
    for number in range(3):
        reservations.reserve(f"a{number}", Reservation("a", 1, 10, 1, 0))
    reservations.reserve("b0", Reservation("b", 1, 10, 1, 0))
    assert reservations.release_server("a") == 3
    assert reservations.release("a1") is None
    assert reservations.recount() == {"b": (1, 10)}
