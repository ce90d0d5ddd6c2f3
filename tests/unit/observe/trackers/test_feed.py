"""Delivery to a tracker: each point once and in order, over restarts, crashes and roll-backs."""

import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from realsys.errors import ConfigError
from realsys.observe.trackers import process
from realsys.observe.trackers.contract import Run, Tracker
from realsys.observe.trackers.file import FileTracker
from realsys.observe.trackers.process import HANGING_S, Feed, Follower
from tests.support.run_logs import append, evaluation, recovered, train, warmup


class Listed(Tracker):
    """A tracker that lists what it gets in ``calls``."""

    def __init__(self, run, calls):
        super().__init__(run)
        self.calls = calls
        calls.append(("new", dict(run.delivered), dict(run.state)))

    def log(self, point):
        self.calls.append((point.kind, point.step, point.index))

    def roll_back(self, step):
        self.calls.append(("back", step))

    def flush(self):
        self.run.state["flushed"] = self.run.state.get("flushed", 0) + 1

    def close(self, status):
        self.calls.append(("close", status))


class Trial:
    """A step log with its feeds."""

    def __init__(self, folder):
        self.folder, self.steps, self.calls = folder, folder / "steps.jsonl", list[Any]()
        self.files: list[Feed] = []
        self.position = folder / "trackers" / "listed.json"

    def feed(self):
        run = Run("exp", "t", self.folder, {"seed": 1}, "0.1")
        return Feed(self.steps, self.position, run, lambda told: Listed(told, self.calls))

    def file_feed(self):
        run = Run("exp", "t", self.folder)
        made = Feed(self.steps, self.folder / "trackers" / "file.json", run, FileTracker)
        self.files.append(made)
        return made

    def lines(self):
        """Return (kind, step) of the lines of metrics.jsonl."""
        lines = map(msgspec.json.decode, (self.folder / "metrics.jsonl").read_bytes().splitlines())
        return [(line["kind"], line["step"]) for line in lines]


@pytest.fixture
def trial(tmp_path):
    made = Trial(tmp_path)
    yield made
    for file in made.files:
        file.close("")


def test_points_are_delivered_once_in_order(trial):
    first = trial.feed()
    assert first.deliver() == 0
    append(trial.steps, {"kind": "phase", "phase": "warmup", "time": 1.0}, warmup(1), evaluation(0), train(1))
    assert first.deliver() == 4 and first.deliver() == 0
    assert trial.calls[1:] == [("warmup", 1, 0), ("eval", 0, 1), ("train", 1, 2)]


def test_next_start_continues_where_the_last_ended(trial):
    append(trial.steps, train(1), train(2))
    first = trial.feed()
    first.deliver()
    first.close("interrupted")
    append(trial.steps, train(3))
    del trial.calls[:]
    assert trial.feed().deliver() == 1
    assert trial.calls == [("new", {"train": 2}, {"flushed": 1}), ("train", 3, 2)]


def test_state_of_a_failed_start_is_kept(trial):
    def failing(run):
        run.state["id"] = "a"
        raise OSError("no connection")

    with pytest.raises(OSError, match="no connection"):
        Feed(trial.steps, trial.position, Run("exp", "t", trial.folder), failing)
    trial.feed()
    assert trial.calls == [("new", {}, {"id": "a"})]


def test_record_without_its_newline_waits(trial):
    made = trial.feed()
    trial.steps.write_text('{"kind":"train","st')
    assert made.deliver() == 0
    trial.steps.write_text('{"kind":"train","step":1}\n')
    assert made.deliver() == 1


def test_roll_back_is_told_and_noted(trial):
    append(trial.steps, warmup(9), train(1), train(2), recovered(1))
    trial.feed().deliver()
    assert trial.calls[-1] == ("back", 1)
    del trial.calls[:]
    trial.feed()
    assert trial.calls == [("new", {"warmup": 9, "train": 1}, {"flushed": 2})]


def test_roll_back_to_the_start_undoes_the_warm_up(trial):
    append(trial.steps, warmup(9), train(1), recovered(-1))
    trial.feed().deliver()
    del trial.calls[:]
    trial.feed()
    assert trial.calls[0][1] == {"train": -1}


def test_long_log_is_delivered_in_batches(trial, monkeypatch):
    monkeypatch.setattr(process, "RECORDS_AT_ONCE", 2)
    append(trial.steps, train(1), train(2), train(3))
    made = trial.feed()
    assert [made.deliver(), made.deliver(), made.deliver()] == [2, 1, 0]
    assert [call[1] for call in trial.calls[1:]] == [1, 2, 3]


def test_failed_delivery_comes_again(trial, monkeypatch):
    append(trial.steps, train(1), train(2))
    with monkeypatch.context() as patch:
        patch.setattr(Listed, "flush", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trial.feed().deliver()
    del trial.calls[:]
    trial.feed().deliver()
    assert [call[:2] for call in trial.calls[1:]] == [("train", 1), ("train", 2)]


@pytest.mark.parametrize("content", [b"", b"{", b'{"offset": "x"}', b'{"offset": 99999}'])
def test_damaged_or_foreign_position_starts_anew(trial, content):
    trial.position.parent.mkdir()
    trial.position.write_bytes(content)
    append(trial.steps, train(1))
    assert trial.feed().deliver() == 1


def test_file_has_each_step_once_after_crash(trial, monkeypatch):
    """Killed between the flush of the tracker and the note that it was delivered."""
    append(trial.steps, train(1))
    made = trial.file_feed()
    made.deliver()
    append(trial.steps, train(2), train(3))
    with monkeypatch.context() as patch:
        patch.setattr(Feed, "_save", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.deliver()
    assert trial.lines() == [("train", 1), ("train", 2), ("train", 3)]
    trial.file_feed().deliver()
    assert trial.lines() == [("train", 1), ("train", 2), ("train", 3)]


def test_file_loses_the_steps_of_a_roll_back(trial):
    append(trial.steps, warmup(9), train(1), evaluation(1, version=2), train(2), recovered(1), train(2), train(3))
    made = trial.file_feed()
    made.deliver()
    made.close("done")
    assert trial.lines() == [("warmup", 9), ("train", 1), ("train", 2), ("train", 3)]


def test_file_survives_a_crash_after_a_roll_back(trial, monkeypatch):
    """The file is shorter then than the note of its size says."""
    append(trial.steps, *(train(step) for step in range(1, 6)))
    made = trial.file_feed()
    made.deliver()
    append(trial.steps, recovered(1), *(train(step) for step in range(2, 9)))
    monkeypatch.setattr(process, "RECORDS_AT_ONCE", 3)
    made.deliver()
    with monkeypatch.context() as patch:
        patch.setattr(Feed, "_save", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.deliver()
    again = trial.file_feed()
    while again.deliver():
        pass
    assert trial.lines() == [("train", step) for step in range(1, 9)]


def test_crash_in_a_roll_back_repeats_no_point(trial, monkeypatch):
    """Killed after the file was rewritten: it lacks a step then, and has an evaluation that came with the roll-back."""
    append(trial.steps, *(train(step) for step in range(1, 6)))
    made = trial.file_feed()
    made.deliver()
    append(trial.steps, evaluation(3), recovered(4))
    with monkeypatch.context() as patch:
        patch.setattr(Feed, "_roll_back", lambda self, step: self._tracker.roll_back(step) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.deliver()
    trial.file_feed().deliver()
    assert trial.lines() == [*(("train", step) for step in range(1, 5)), ("eval", 3)]


def test_evaluations_need_not_ascend(trial):
    """Both were due after step 20. The first one was sampled by newer weights."""
    append(trial.steps, evaluation(20, version=22), evaluation(20, set="other"))
    trial.feed().deliver()
    trial.feed()
    assert trial.calls[-1][1] == {"eval": 22}


# ---- The thread of one tracker: it retries, gives up, hangs, and ends


BOUND_S = 30.0


class FakeFeed:
    """A feed with ``records`` to deliver; ``acts`` are called one after the other at each delivery."""

    def __init__(self, *acts):
        self.acts, self.closed, self.made = list(acts), "", 0

    def make(self):
        self.made += 1
        return self

    def deliver(self):
        return int(self.acts.pop(0)()) if self.acts else 0

    def close(self, status):
        self.closed = status


@pytest.fixture
def said():
    return []


@pytest.fixture
def released():
    event = threading.Event()
    yield event
    event.set()


def failing():
    raise OSError("no route\nto host")


def ended(feed, said, *retry_s):
    """Return a follower that has ended."""
    follower = Follower("mine", feed.make, said.append, retry_s)
    follower.end("done")
    follower.start()
    assert follower.join(BOUND_S)
    return follower


def test_end_delivers_all_and_closes(said):
    feed = FakeFeed(lambda: 2, lambda: 1)
    ended(feed, said)
    assert (feed.acts, feed.closed, said) == ([], "done", [])


def test_failed_tracker_is_made_again(said):
    made = threading.Event()
    feed = FakeFeed(failing, failing, lambda: 1, lambda: made.set() or 0)
    follower = Follower("mine", feed.make, said.append, (0.0, 0.0, 0.0))
    follower.start()
    assert made.wait(BOUND_S)
    follower.end("done")
    assert follower.join(BOUND_S)
    assert feed.made == 3 and feed.closed == "done"
    assert said == ["tracker mine failed: OSError: no route to host: the run goes on, and the tracker is tried again"]


def test_tracker_is_given_up_after_retries(said):
    feed = FakeFeed(*[failing] * 9)
    follower = Follower("mine", feed.make, said.append, (0.0, 0.0))
    follower.start()
    assert follower.join(BOUND_S)
    assert feed.made == 3 and feed.closed == "" and len(said) == 2
    assert said[1].endswith("what the tracker misses is delivered when the trial continues")


def test_success_gives_the_retries_back(said):
    feed = FakeFeed(failing, lambda: 1, failing, lambda: 1, failing, lambda: 1, failing, failing)
    follower = Follower("mine", feed.make, said.append, (0.0,))
    follower.start()
    assert follower.join(BOUND_S)
    assert feed.made == 5


def test_failure_at_the_end_is_not_retried(said):
    feed = FakeFeed(failing)
    ended(feed, said, 1000.0)
    assert feed.made == 1 and len(said) == 1


def test_bad_settings_are_not_retried(said):
    def refused():
        raise ConfigError("telemetry.trackers", "mine", "cannot be built: no such project")

    follower = Follower("mine", FakeFeed(refused).make, said.append, (1000.0,))
    follower.start()
    assert follower.join(BOUND_S)
    assert "is given up" in said[0] and "no such project" in said[0]


def test_code_that_exits_is_a_failure(said):
    def exits():
        raise SystemExit(3)

    ended(FakeFeed(exits), said)
    assert said[0].startswith("tracker mine failed: SystemExit: 3")


def test_hanging_tracker_is_named_once(said, released):
    entered = threading.Event()

    def hangs():
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


def test_slow_tracker_is_not_hanging(tmp_path, said, monkeypatch):
    """It takes a second for each of the 200 steps that it missed."""
    clock = SimpleNamespace(now=0.0)
    hangs: list[bool] = []

    class Slow(Tracker):
        def log(self, point):
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
