"""The bounds of a reward service on what it holds."""

import pytest

from realsys.cluster.http_server import RefusedRequest
from realsys.reward.reward_server import RequestRoom


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
