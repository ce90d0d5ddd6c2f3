"""The thread of one tracker: it retries, gives up, hangs, and ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realsys.errors import ConfigError
from realsys.observe.trackers.contract import Point, Run, Tracker
from realsys.observe.trackers.process import HANGING_S, Feed, Follower
from tests.support.telemetry.step_logs import append, train

BOUND_S = 30.0


class FakeFeed:
    """A feed with ``records`` to deliver; ``acts`` are called one after the other at each delivery."""

    def __init__(self, *acts: Any) -> None:
        self.acts, self.closed, self.made = list(acts), "", 0

    def make(self) -> Any:
        self.made += 1
        return self

    def deliver(self) -> int:
        return int(self.acts.pop(0)()) if self.acts else 0

    def close(self, status: str) -> None:
        self.closed = status


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def failing() -> int:
    raise OSError("no route\nto host")


def ended(feed: FakeFeed, said: list[str], *retry_s: float) -> Follower:
    """Return a follower that has ended."""
    follower = Follower("mine", feed.make, said.append, retry_s)
    follower.end("done")
    follower.start()
    assert follower.join(BOUND_S)
    return follower


def test_end_delivers_all_and_closes(said: list[str]) -> None:
    feed = FakeFeed(lambda: 2, lambda: 1)
    ended(feed, said)
    assert (feed.acts, feed.closed, said) == ([], "done", [])


def test_failed_tracker_is_made_again(said: list[str]) -> None:
    made = threading.Event()
    feed = FakeFeed(failing, failing, lambda: 1, lambda: made.set() or 0)
    follower = Follower("mine", feed.make, said.append, (0.0, 0.0, 0.0))
    follower.start()
    assert made.wait(BOUND_S)
    follower.end("done")
    assert follower.join(BOUND_S)
    assert feed.made == 3 and feed.closed == "done"
    assert said == ["tracker mine failed: OSError: no route to host: the run goes on, and the tracker is tried again"]


def test_tracker_is_given_up_after_retries(said: list[str]) -> None:
    feed = FakeFeed(*[failing] * 9)
    follower = Follower("mine", feed.make, said.append, (0.0, 0.0))
    follower.start()
    assert follower.join(BOUND_S)
    assert feed.made == 3 and feed.closed == "" and len(said) == 2
    assert said[1].endswith("what the tracker misses is delivered when the trial continues")


def test_success_gives_the_retries_back(said: list[str]) -> None:
    feed = FakeFeed(failing, lambda: 1, failing, lambda: 1, failing, lambda: 1, failing, failing)
    follower = Follower("mine", feed.make, said.append, (0.0,))
    follower.start()
    assert follower.join(BOUND_S)
    assert feed.made == 5


def test_failure_at_the_end_is_not_retried(said: list[str]) -> None:
    feed = FakeFeed(failing)
    ended(feed, said, 1000.0)
    assert feed.made == 1 and len(said) == 1


def test_bad_settings_are_not_retried(said: list[str]) -> None:
    def refused() -> int:
        raise ConfigError("telemetry.trackers", "mine", "cannot be built: no such project")

    follower = Follower("mine", FakeFeed(refused).make, said.append, (1000.0,))
    follower.start()
    assert follower.join(BOUND_S)
    assert "is given up" in said[0] and "no such project" in said[0]


def test_code_that_exits_is_a_failure(said: list[str]) -> None:
    def exits() -> int:
        raise SystemExit(3)

    ended(FakeFeed(exits), said)
    assert said[0].startswith("tracker mine failed: SystemExit: 3")


def test_hanging_tracker_is_named_once(said: list[str], released: threading.Event) -> None:
    entered = threading.Event()

    def hangs() -> int:
        entered.set()
        return released.wait(BOUND_S) and 0

    follower = Follower("mine", FakeFeed(hangs).make, said.append)
    follower.start()
    assert entered.wait(BOUND_S)
    assert follower._busy_since is not None
    later = follower._busy_since + HANGING_S + 1
    assert not follower.is_hanging(later - 2) and said == []
    assert follower.is_hanging(later) and follower.is_hanging(later) and len(said) == 1
    assert said[0].startswith("tracker mine has not answered for 60 s: the run goes on")
    released.set()
    follower.end("done")
    assert follower.join(BOUND_S) and not follower.is_hanging(later)


def test_slow_tracker_is_not_hanging(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a second for each of the 200 steps that it missed."""
    clock = SimpleNamespace(now=0.0)
    hangs: list[bool] = []

    class Slow(Tracker):
        def log(self, point: Point) -> None:
            clock.now += 1.0
            hangs.append(follower.is_hanging(clock.now))

    monkeypatch.setattr("realsys.observe.trackers.process.time", SimpleNamespace(monotonic=lambda: clock.now))
    append(tmp_path / "steps.jsonl", *map(train, range(200)))
    feed = Feed(tmp_path / "steps.jsonl", tmp_path / "position.json", Run("e", "t", tmp_path), Slow)
    follower = Follower("slow", lambda: feed, said.append)
    follower.end("done")
    follower.start()
    assert follower.join(BOUND_S) and said == []
    assert hangs == [False] * 200
