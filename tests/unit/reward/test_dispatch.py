"""Which reward service gets which items: rules one by one, and all of them under random events."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.cluster.http_server import RefusedRequest
from realsys.reward.dispatch import FEWEST, JUDGEMENTS, LAST_DELAY_S, MOST_BYTES, WINDOW, Dispatch, DispatchBounds
from realsys.reward.reward_server import RequestRoom
from realsys.reward.verifier_protocol import (
    DIED,
    MAX_ITEMS,
    RAISED,
    REFUSED,
    Decided,
    NoVerdict,
    NoVerifier,
    VerifierWork,
)
from realsys.reward.verifiers.contract import Verdict

RETRY_S, TOTAL_S = 60.0, 600.0
RIGHT = Verdict(correct=True)
FAILED = NoVerdict(RAISED, "it raised")
UNABLE = NoVerifier("it cannot judge")
EXACT = VerifierWork("exact")


class World:
    """Items 0, 1, ... and services of any names. ``ends``: item -> outcome; None if it was dropped."""

    def __init__(self, *names: str, seed: int = 0) -> None:
        self.now = 100.0
        self.dispatch = Dispatch(DispatchBounds(RETRY_S, TOTAL_S), Random(seed), self.now)
        self.ends = {}
        self.failed_at: dict[int, list[str]] = {}  # item -> services that gave no verdict
        self.lost_at: dict[int, set[str]] = {}  # item -> services that were lost or unable while they had it
        self.added = 0
        self.register(*names)

    @property
    def sends(self):
        """Requests that have not ended, by number."""
        return self.dispatch._sends

    def register(self, *names: str, incarnation: str = "1") -> None:
        self.names = set(names)
        self.dispatch.registered({name: (f"http://{name}", incarnation) for name in names})

    def add(self, count: int = 1, work: VerifierWork = EXACT, size: int = 10) -> None:
        for _ in range(count):
            self.dispatch.add(self.added, work, b"x" * size, self.now)
            self.added += 1

    def take(self):
        """Make the requests that are due, and check them."""
        new = self.dispatch.take(self.now)
        for send in new:
            instance = send.instance
            assert instance.blocked_until <= self.now, "left-alone"
            assert 0 < instance.outstanding <= WINDOW, "bounded-window"
            for entry in send.entries.values():
                assert entry.number not in self.ends, "one-end"
                failed_at = self.failed_at.get(entry.number, [])
                assert len(failed_at) < JUDGEMENTS
                avoided = self.lost_at.get(entry.number, set()).union(failed_at)
                others = (each for each in self.dispatch._instances.values() if each.name not in avoided)
                if instance.name in avoided:
                    assert all(other.is_away(self.now) for other in others), "another-service"
        self._check()
        return new

    def items(self, send) -> list[int]:
        return [entry.number for entry in send.entries.values()]

    def decide(self, send, outcome, count: int | None = None, *, over_limit: bool = False):
        """Let the service of a Send decide its first ``count`` items, or all."""
        indexes = list(send.entries)[:count]
        for number in (send.entries[index].number for index in indexes):
            if isinstance(outcome, NoVerdict):
                self.failed_at.setdefault(number, []).append(send.instance.name)
            elif outcome is UNABLE:
                self.lost_at.setdefault(number, set()).add(send.instance.name)
        self._settle(
            self.dispatch.decided(send.number, [Decided(i, outcome, over_limit) for i in indexes], self.now), outcome
        )

    def lose(self, send, *, died: bool = True) -> None:
        for item in self.items(send):
            self.lost_at.setdefault(item, set()).add(send.instance.name)
        self._settle(self.dispatch.lost(send.number, "connection failed", self.now, died=died), DIED)

    def refuse(self, send, retry_after_s: float = 1.0) -> None:
        self.dispatch.refused(send.number, retry_after_s, "full", self.now)
        self._check()

    def reject(self, send) -> None:
        self._settle(self.dispatch.rejected(send.number, "wrong token"), "rejected")

    def drop(self, item: int) -> int | None:
        """A caller is cancelled. Returns the Send that is aborted."""
        aborted = self.dispatch.drop(item)
        self.ends.setdefault(item, None)
        self._check()
        return aborted

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._settle(self.dispatch.expire(self.now), "waited")

    def finish(self, steps: int = 1000) -> None:
        """Let all services work, as long as anything is left to do."""
        for _ in range(steps):
            for send in [*self.take(), *self.sends.values()]:
                if send.number in self.sends:
                    self.decide(send, RIGHT)
            if len(self.ends) == self.added:
                return
            due = self.dispatch.due(self.now)
            assert due is not None, "an item is left that nothing will wake"
            self.pass_time(max(0.0, due - self.now))
        raise AssertionError(f"{self.added - len(self.ends)} items never end")

    def _settle(self, settled, cause) -> None:
        for end in settled:
            assert end.number not in self.ends, f"one-end: item {end.number} ended twice ({cause})"
            self.ends[end.number] = end.outcome
        self._check()

    def _check(self) -> None:
        """Every item that has not ended is in one lot or in one Send."""
        lots = [e.number for lot in self.dispatch._lots.values() for e in lot if not e.gone]
        held = [e.number for send in self.dispatch._sends.values() for e in send.entries.values() if not e.gone]
        assert sorted(lots + held) == sorted(set(range(self.added)) - self.ends.keys())
        assert self.dispatch.waiting == len(lots)
        for instance in self.dispatch._instances.values():
            sends = [send for send in self.sends.values() if send.instance is instance]
            assert instance.outstanding == sum(len(send.entries) for send in sends)
            assert instance.trial in (-1, *(send.number for send in sends))


# ---- Which reward service gets which items: rules one by one, and all of them under random events


def test_items_spread_over_the_services():
    world = World("a", "b")
    world.add(2 * FEWEST)
    assert sorted((send.instance.name, len(send.entries)) for send in world.take()) == [("a", FEWEST), ("b", FEWEST)]


def test_few_items_travel_together():
    world = World("a", "b")
    world.add(FEWEST)
    [send] = world.take()
    assert len(send.entries) == FEWEST


def test_service_with_fewest_items_is_next():
    world = World("a", "b")
    world.add(FEWEST)
    [first] = world.take()
    world.add(1)
    [second] = world.take()
    assert second.instance is not first.instance


def test_full_window_waits_for_a_reply():
    world = World("a")
    world.add(WINDOW + 5)
    sends = world.take()
    assert sum(len(send.entries) for send in sends) == WINDOW and max(len(s.entries) for s in sends) == MAX_ITEMS
    assert world.take() == [] and world.dispatch.waiting == 5
    world.decide(sends[0], RIGHT)
    assert [len(send.entries) for send in world.take()] == [5]


def test_large_items_travel_alone():
    world = World("a")
    world.add(3, size=MOST_BYTES)
    assert [len(send.entries) for send in world.take()] == [1, 1, 1]


def test_verifiers_take_turns():
    world = World("a")
    world.add(WINDOW)
    world.add(1, VerifierWork("math"))
    assert [send.work.name for send in world.take()][:2] == ["exact", "math"]


def test_full_service_is_left_alone():
    world = World("a")
    world.add(3)
    [send] = world.take()
    world.refuse(send, retry_after_s=7.0)
    world.pass_time(6.9)
    assert world.take() == []
    world.pass_time(7.0 * 0.5 + 0.2)  # the random part
    [again] = world.take()
    assert world.items(again) == [0, 1, 2], "their order is kept"


def test_items_of_full_service_go_elsewhere():
    world = World("a", "b")
    world.add(3)
    [send] = world.take()
    world.refuse(send)
    [again] = world.take()
    assert again.instance is not send.instance


def test_suspect_service_gets_one_send_first():
    world = World("a")
    world.add(2 * MAX_ITEMS)
    first, second = world.take()
    world.lose(first)
    world.lose(second)
    world.pass_time(LAST_DELAY_S)
    [trial] = world.take()
    assert world.take() == []
    world.dispatch.accepted(trial.number, world.now)
    assert len(world.take()) == 1


def test_delays_of_dead_service_grow():
    world = World("a")
    world.add(1)
    delays = []
    for _ in range(6):
        [send] = world.take()
        world.lose(send, died=False)
        delays.append(send.instance.blocked_until - world.now)
        world.pass_time(delays[-1])
    assert delays[0] < 1.0 < delays[3] and LAST_DELAY_S <= delays[5] <= 1.5 * LAST_DELAY_S


def test_restarted_service_is_a_new_one():
    world = World("a")
    world.add(1)
    [send] = world.take()
    world.lose(send)
    assert world.take() == []
    world.register("a", incarnation="2")
    assert len(world.take()) == 1


def test_items_of_dead_service_go_elsewhere():
    world = World("a", "b")
    world.add(4)
    [send] = world.take()
    world.decide(send, RIGHT, 1)
    world.lose(send)
    [again] = world.take()
    assert again.instance.name != send.instance.name and world.items(again) == [1, 2, 3]


def test_second_judgement_is_by_another_service():
    world = World("a", "b")
    world.add(1)
    [send] = world.take()
    world.decide(send, FAILED)
    assert world.ends == {}
    [again] = world.take()
    assert again.instance.name != send.instance.name
    world.decide(again, FAILED)
    assert world.ends == {0: FAILED}


def test_failing_service_stays_the_last_choice():
    """Also if the second one died in between."""
    world = World("a", "b", "c")
    world.add(1)
    [first] = world.take()
    world.decide(first, FAILED)
    [second] = world.take()
    world.lose(second)
    [third] = world.take()
    assert len({send.instance.name for send in (first, second, third)}) == 3


def test_only_service_judges_twice():
    world = World("a")
    world.add(1)
    for _ in range(2):
        [send] = world.take()
        world.decide(send, FAILED)
    assert world.ends == {0: FAILED}


def test_refused_reference_is_final():
    world = World("a", "b")
    world.add(1, VerifierWork("exact", check=True))
    [send] = world.take()
    refused = NoVerdict(REFUSED, "it is bad")
    world.decide(send, refused)
    assert world.ends == {0: refused}


def test_service_that_cannot_judge_is_replaced():
    """Its host may lack memory; a verifier that no service can load is an error by name."""
    world = World("a", "b")
    world.add(1)
    [send] = world.take()
    world.decide(send, UNABLE)
    [again] = world.take()
    assert again.instance.name != send.instance.name
    world.decide(again, UNABLE)
    assert world.ends == {0: UNABLE}


def test_only_service_that_cannot_judge_ends_items():
    world = World("a")
    world.add(2)
    [send] = world.take()
    world.decide(send, UNABLE)
    assert world.ends == {0: UNABLE, 1: UNABLE}


def test_item_that_kills_services_fails_alone():
    world = World("a", "b", "c", "d")
    world.add(16)
    poison = 3
    for _ in range(200):
        for send in world.take():
            if poison in world.items(send):
                world.lose(send)
            else:
                world.decide(send, RIGHT)
        if len(world.ends) == world.added:
            break
        world.pass_time(1.0)
    assert world.ends.pop(poison).cause == DIED
    assert world.ends == dict.fromkeys(set(range(16)) - {poison}, RIGHT)


def test_silent_service_blames_no_item():
    world = World("a", "b")
    world.add(1)
    for _ in range(6):
        while not (sends := world.take()):
            world.pass_time(1.0)
        world.lose(sends[0], died=False)
    assert world.ends == {}


def test_wait_without_services_ends_by_name():
    world = World()
    world.add(2)
    world.pass_time(RETRY_S - 1)
    assert world.ends == {} and world.dispatch.due(world.now) == pytest.approx(world.now + 1)
    world.pass_time(1)
    waited = NoVerifier("waited 60 s for a reward service: none is in the name store")
    assert world.ends == {0: waited, 1: waited}


def test_wait_names_the_last_problem():
    world = World("a")
    world.add(1)
    while not world.ends:
        for send in world.take():
            world.lose(send, died=False)
        world.pass_time(1.0)
    assert world.ends[0].message.endswith("s for a reward service: a: connection failed")


def test_refusals_are_answers_up_to_a_bound():
    world = World("a")
    world.add(1)
    begin = world.now
    while not world.ends:
        for send in world.take():
            world.refuse(send)
        world.pass_time(1.0)
    assert TOTAL_S <= world.now - begin < TOTAL_S + 2


def test_rejected_request_is_not_repeated():
    world = World("a", "b")
    world.add(2)
    [send] = world.take()
    world.reject(send)
    assert [end.message for end in world.ends.values()] == ["wrong token"] * 2


def test_cancelled_items_abort_their_request():
    world = World("a")
    world.add(2)
    [send] = world.take()
    assert world.drop(0) is None, "another item of the request is wanted"
    assert world.drop(1) == send.number
    assert send.instance.outstanding == 0 and world.dispatch.due(world.now) is None


def test_cancelled_item_that_waits_is_forgotten():
    world = World()
    world.add(2)
    world.drop(0)
    world.register("a")
    [send] = world.take()
    assert world.items(send) == [1]


def test_late_reply_of_given_up_request_is_ignored():
    world = World("a")
    world.add(1)
    [send] = world.take()
    world.lose(send)
    world.dispatch.accepted(send.number, world.now)
    world.decide(send, RIGHT)
    assert world.ends == {} and world.take() == []


EVENTS = ("add", "decide", "fail", "unable", "refuse", "die", "silent", "drop", "register", "time")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_item_ends_exactly_once(data):
    """Whatever the services do; ``World`` checks each invariant after each event."""
    world = World("a", seed=data.draw(st.integers(0, 99)))
    incarnations = 1
    for event in data.draw(st.lists(st.sampled_from(EVENTS), max_size=40)):
        world.take()
        send = data.draw(st.sampled_from(list(world.sends.values()))) if world.sends else None
        if event == "add":
            world.add(data.draw(st.integers(1, 40)), VerifierWork(data.draw(st.sampled_from(("exact", "math")))))
        elif event == "drop" and world.added:
            world.drop(data.draw(st.integers(0, world.added - 1)))
        elif event == "register":
            incarnations += 1
            world.register(*data.draw(st.sets(st.sampled_from("abcd"))), incarnation=str(incarnations // 2))
        elif event == "time":
            world.pass_time(data.draw(st.floats(0.0, 20.0)))
        elif send is not None and event in ("decide", "fail", "unable"):
            outcome = {"decide": RIGHT, "fail": FAILED, "unable": UNABLE}[event]
            world.decide(send, outcome, data.draw(st.integers(1, len(send.entries))))
        elif send is not None and event in ("die", "silent"):
            world.lose(send, died=event == "die")
        elif send is not None and event == "refuse":
            world.refuse(send, data.draw(st.sampled_from((0.0, 1.0, 5.0))))
    world.finish()


# ---- The bounds of a reward service on what it holds


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_full_room_refuses_until_items_leave():
    room = RequestRoom(10, Clock())
    room.enter(8)
    with pytest.raises(RefusedRequest, match="8 completions are held, at most 10") as refused:
        room.enter(3)
    assert refused.value.status == 503 and refused.value.retry_after_s > 0
    room.leave(decided=True)
    room.enter(3)
    assert (room.items, room.refused) == (10, 1)


def test_empty_room_takes_any_request():
    """Else a request that is larger than the bound would be refused for ever."""
    room = RequestRoom(10, Clock(), max_bytes=10)
    room.enter(64)
    with room.body(1000):
        assert room.bytes == 1000
        with pytest.raises(RefusedRequest, match="1000 bytes of requests are held"), room.body(1):
            pass
    assert room.bytes == 0


def test_refusal_says_how_long_to_wait():
    clock = Clock()
    room = RequestRoom(100, clock)
    room.enter(100)
    for _ in range(40):
        room.leave(decided=True)
    room.enter(40)
    clock.now += 10.0  # 4 items per second
    with pytest.raises(RefusedRequest) as refused:
        room.enter(12)
    assert refused.value.retry_after_s == 3


def test_items_that_callers_give_up_are_not_decided():
    room = RequestRoom(10, Clock())
    room.enter(2)
    room.leave(decided=False)
    room.leave(decided=True)
    assert (room.items, room.decided.total) == (0, 1)
