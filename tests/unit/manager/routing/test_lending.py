"""Servers that use devices of ranks in turn with them: whose turn it is, what they are ordered, when a turn ends."""

import pytest

from realsys.manager.decisions import ManagerState
from realsys.manager.messages import DevicesReply, DevicesRequest, EvaluateRequest
from realsys.manager.operations import status
from realsys.manager.routing.lending import Lending, Progress, Shift
from realsys.manager.routing.servers import Idle, UpdateOrder
from tests.support.ledger.manager_states import A, B, address, finish, place, published, ready, start, tickets, update

LENT = frozenset({"generation_server/1"})
NAME = "generation_server/1"


def move(state: ManagerState, turn: str, now: float = 0.0, *, batch: bool = True, incarnation: str = A) -> DevicesReply:
    return state.move_devices(DevicesRequest(incarnation, turn, batch), now)  # type: ignore[arg-type]


def shift(state: ManagerState, *, sleeps: bool, now: float = 0.0) -> None:
    """The lent server gets this order, and follows it."""
    order = state.next_order(NAME, "1", now)
    assert isinstance(order, Shift) and order.sleeps is sleeps
    state.servers.shifted(order, now)


def lent(servers: int = 2, **changes: object) -> ManagerState:
    """Servers of which one is lent; a trainer that has published and has given the devices to it."""
    state = ManagerState(ready(lent=LENT, **changes).settings)
    state.open(0.0)
    start(state, -1, A)
    state.observe_servers([address(index) for index in range(2 - servers, 2)])
    assert not move(state, "trainer", batch=False).done
    shift(state, sleeps=True)
    assert move(state, "trainer", batch=False).done
    state.servers.publish(published(0, A))
    if servers > 1:
        update(state, 0)
    assert move(state, "servers").done
    shift(state, sleeps=False)
    update(state, 1)
    return state


def test_nothing_is_ordered_before_the_trainer_says_whose_turn_it_is():
    state = ManagerState(ready(lent=LENT).settings)
    start(state, -1, A)
    state.observe_servers([address(0), address(1)])
    state.servers.publish(published(0, A))
    assert state.next_order(NAME, "1", 0.0) == Idle()
    assert isinstance(state.next_order("generation_server/0", "1", 0.0), UpdateOrder), "one that is not lent updates"
    assert status(state, 0.0, 0.0)["devices"]["turn"] == "unknown"


def test_a_sleeping_server_gets_no_request_and_keeps_no_version():
    state = lent()
    assert {route.name for route in state.servers.all() if state.servers.current(route)} == {address(0).name, NAME}
    reply = move(state, "trainer")
    assert not reply.done and reply.reason == f"{NAME} must fall asleep"
    assert [route for route in state.servers.all() if state.servers.current(route)] == [
        state.servers.get("generation_server/0")
    ], "it gets no request from the moment that its turn is over"
    shift(state, sleeps=True)
    assert move(state, "trainer").done
    server = state.servers.get(NAME)
    assert server is not None and server.state == "asleep" and server.verified is None
    [ticket] = tickets(state)
    assert place(state, ticket).server == "generation_server/0"
    state.servers.publish(published(1, A))
    assert state.servers.in_use() == [0, 1], "version 0 for the other server only"
    assert state.next_order(NAME, "1", 0.0) == Idle(), "it loads nothing while it sleeps"
    move(state, "servers")
    shift(state, sleeps=False)
    update(state, 1)
    assert server.verified == published(1, A)


def test_all_servers_of_one_device_sleep_and_the_page_says_so():
    state = lent(servers=1)
    [ticket] = tickets(state)
    place(state, ticket)
    move(state, "trainer")
    shift(state, sleeps=True)
    assert state.refusal() == "no_server"
    assert f"{NAME} asleep" in status(state, 0.0, 0.0)["admission"]["explanation"]
    assert state.ledger.counts.open["running"] == 1, "what it samples goes on when it wakes"


def test_a_server_that_does_not_follow_is_asked_again_later():
    state = lent()
    move(state, "trainer")
    order = state.next_order(NAME, "1", 1.0)
    assert isinstance(order, Shift)
    state.servers.unshifted(order, "hangs", 1.0)
    assert state.next_order(NAME, "1", 1.0) == Idle(1.5)
    assert not move(state, "trainer", 2.0).done
    shift(state, sleeps=True, now=2.0)
    assert move(state, "trainer", 2.0).done


def test_a_server_that_is_gone_is_not_waited_for_and_a_new_one_sleeps_first():
    state = lent()
    move(state, "trainer")
    state.observe_servers([address(0)])
    assert move(state, "trainer").done
    state.observe_servers([address(0), address(1, "2")])
    order = state.next_order(NAME, "2", 0.0)
    assert isinstance(order, Shift) and order.sleeps


def test_a_server_that_wakes_is_waited_for_when_the_turn_ends_first():
    state = lent()
    move(state, "trainer")
    shift(state, sleeps=True)
    move(state, "servers")
    order = state.next_order(NAME, "1", 0.0)
    assert isinstance(order, Shift) and not order.sleeps
    reply = move(state, "trainer")
    assert not reply.done and reply.reason == f"{NAME} must fall asleep", "it may have memory already"
    state.servers.shifted(order, 0.0)
    shift(state, sleeps=True)
    assert move(state, "trainer").done


def test_groups_are_left_for_the_servers_that_sleep():
    """Two servers may run 12 groups: while one sleeps, the other has half of them."""
    state = lent(batch_groups=4, eta=2)
    move(state, "trainer")
    shift(state, sleeps=True)
    granted = tickets(state, 20)
    assert len(granted) == 6 and state.refusal() == "asleep"
    assert "lent servers" in status(state, 0.0, 0.0)["admission"]["explanation"]
    finish(state, granted[0])
    assert state.refusal() is None, "a place is free"
    move(state, "servers")
    shift(state, sleeps=False)
    update(state, 1)
    assert len(tickets(state, 20)) == 6


def test_an_evaluation_ends_before_its_only_servers_sleep():
    state = lent(servers=1)
    state.evaluate(EvaluateRequest("e", "eval", 1, incarnation=A), 0.0)
    [ticket] = tickets(state)
    assert ticket.ticket_id.startswith("eval-")
    place(state, ticket)
    reply = move(state, "trainer")
    assert not reply.done and "evaluation e runs" in reply.reason
    assert state.next_order(NAME, "1", 0.0) == Idle(), "it goes on serving"
    finish(state, ticket)
    move(state, "trainer")
    shift(state, sleeps=True)


def test_an_evaluation_keeps_the_devices_for_a_bounded_time():
    state = lent(servers=1)
    state.evaluate(EvaluateRequest("e", "eval", 1, incarnation=A), 0.0)
    hold_s = state.settings.holds.seconds
    assert "evaluation e runs" in move(state, "trainer", 5.0).reason
    assert "evaluation e runs" in move(state, "trainer", 4.0 + hold_s).reason
    assert f"{NAME} must fall asleep" in move(state, "trainer", 5.0 + hold_s).reason
    shift(state, sleeps=True, now=6.0 + hold_s)
    assert move(state, "trainer", 6.0 + hold_s).done


def test_a_completion_of_an_evaluation_is_not_continued_with_other_weights():
    state = lent()
    state.evaluate(EvaluateRequest("e", "eval", 2, incarnation=A), 0.0)
    placed = {place(state, ticket).server: ticket for ticket in tickets(state, 2)}
    assert set(placed) == {"generation_server/0", NAME}
    move(state, "trainer")
    assert state.next_order(NAME, "1", 0.0) == Idle(1.0)
    finish(state, placed[NAME])
    shift(state, sleeps=True, now=1.0)


def test_a_trainer_that_was_replaced_moves_nothing():
    state = lent()
    start(state, 0, B)
    with pytest.raises(Exception, match="must end"):
        move(state, "trainer")
    assert not move(state, "trainer", batch=False, incarnation=B).done
    shift(state, sleeps=True)
    assert move(state, "trainer", batch=False, incarnation=B).done


def decided(switch_s: float = 4.0, **changes: float) -> bool:
    lending = Lending(LENT)
    lending.take(10.0, "")
    lending.asleep(10.0 + switch_s / 2)
    lending.woke(switch_s / 2)
    progress = {"missing": 4, "running": 8, "groups_per_s": 1.0, "fill": 1.0} | changes
    return lending.decide(Progress(**progress))[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "takes"),
    [
        ({}, False),  # full servers lose nothing
        ({"fill": 0.5}, False),  # 4 s at half the rate cost 2 s, less than a switch
        ({"fill": 0.0}, True),
        ({"fill": 0.5, "groups_per_s": 0.25}, True),  # 16 s at half the rate
        ({"fill": 0.5, "groups_per_s": 0.25, "switch_s": 10.0}, False),
        ({"running": 3}, True),  # under max_staleness no further group is granted
        ({"groups_per_s": 0.0}, True),
    ],
)
def test_the_trainer_takes_the_devices_when_waiting_for_another_batch_costs_more_than_a_switch(changes, takes):
    assert decided(**changes) is takes


def test_the_first_batch_is_not_kept_waiting():
    takes, reason = Lending(LENT).decide(Progress(4, 8, 1.0, 1.0))
    assert takes and "not known yet" in reason
