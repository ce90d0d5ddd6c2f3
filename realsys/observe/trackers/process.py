"""The process of the trackers: a thread for each, below the launcher (``realsys.observe.trackers.link``).

    reads    Order from a descriptor, Ended from stdin       writes   reports to a descriptor; both are arguments
    ends     when all trackers have finished or hang, after ``finish_s``, or with the launcher

A process and not threads of the launcher: a library may hold the GIL, print, crash, or hang in a handler at exit.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from realsys.cluster.prctl import die_with_parent
from realsys.config.doors import TRACKER
from realsys.errors import ConfigError
from realsys.observe.step_fields import CURVES, metrics_of, step_of
from realsys.observe.step_log import RECOVERED, StepRecord, StepTail
from realsys.observe.trackers.contract import Point, Run, Tracker
from realsys.observe.trackers.link import LONGEST_TEXT, TrackerOrder, TrialEnded, line

_LOOK_S = 1.0
_NICENESS = 10  # a busy machine serves the run first


def main() -> None:
    with open(int(sys.argv[1]), "rb") as file:
        file.seek(0)
        order = msgspec.json.decode(file.read(), type=TrackerOrder)
    if not die_with_parent(signal.SIGKILL, order.parent):
        return
    os.nice(_NICENESS)
    for number in (signal.SIGTERM, signal.SIGINT):  # a batch system may signal every process; the launcher decides
        signal.signal(number, lambda *_: None)
    reports = int(sys.argv[2])
    os.set_inheritable(reports, False)  # the launcher reads until all writers have ended

    def say(text: str) -> None:
        os.write(reports, line(text[:LONGEST_TEXT]))  # one call: threads do not mix their lines

    followers = [Follower(name, partial(_feed, order, name), say) for name in order.trackers]
    for follower in followers:
        follower.start()
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        for follower in followers:
            follower.is_hanging(time.monotonic())
    text = sys.stdin.buffer.readline()
    ended = msgspec.json.decode(text, type=TrialEnded) if text else TrialEnded("", 0.0)
    # say which trackers did not finish, and leave those that hang alone
    for follower in followers:
        follower.end(ended.status)
    deadline = time.monotonic() + ended.finish_s
    for follower in followers:
        left = 0.0 if follower.is_hanging(time.monotonic()) else deadline - time.monotonic()
        if not follower.join(max(0.0, left)):
            say(f"tracker {follower.name} did not finish within {ended.finish_s:g} s: {LATER}")
    sys.stdout.flush()
    os._exit(0)  # without the handlers of libraries, which may wait for a server


def _feed(order: TrackerOrder, name: str) -> Feed:
    """Return the tracker ``name`` at its position. Raises ConfigError, and what the tracker raises."""
    folder = Path(order.folder)
    position = folder / "trackers" / f"{name.replace(':', '.')}.json"
    run = Run(order.experiment, order.trial, folder, order.config, order.version)
    make = TRACKER.load(name)
    return Feed(folder / "steps.jsonl", position, run, lambda told: make(told, **order.trackers[name]))


# ---- one tracker in a thread: it follows the step log until the run ends, and is made again if it fails
#
#     make ──> deliver ──wait POLL_S──> deliver ... ──end──> deliver ──> close
#       ^          │ exception
#       └─ RETRY_S ┘  at most len(RETRY_S) times in a row; then it is given up
#
# ``is_hanging`` is for the thread that watches: a library that does not return cannot be interrupted.


POLL_S = 2.0
RETRY_S = (5.0, 30.0, 120.0, 300.0)
HANGING_S = 60.0
LATER = "the run goes on, and what the tracker misses is delivered when the trial continues"


class Follower:
    """A tracker of the run. ``say`` shows a text to the user; it is called from the thread of the tracker."""

    def __init__(
        self, name: str, make: Callable[[], Feed], say: Callable[[str], None], retry_s: Sequence[float] = RETRY_S
    ) -> None:
        self.name = name
        self._make = make
        self._say = say
        self._retry_s = retry_s
        self._ended = threading.Event()
        self._status = ""
        self._failures = 0  # failures in a row
        self._busy_since: float | None = None  # monotonic seconds; None while it waits
        self._said_hanging = False
        # A daemon: the process ends although a library hangs.
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, status: str) -> None:
        """Have the tracker take the remaining points, and close it."""
        self._status = status
        self._ended.set()

    def join(self, timeout_s: float) -> bool:
        """Return True if the thread has ended, or ends within ``timeout_s``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def is_hanging(self, now: float) -> bool:
        """Return True if a call of the tracker has not returned for HANGING_S. Says so once."""
        since = self._busy_since
        hangs = since is not None and now - since > HANGING_S
        if hangs and not self._said_hanging:
            self._say(f"tracker {self.name} has not answered for {HANGING_S:.0f} s: {LATER}")
        self._said_hanging |= hangs
        return hangs

    def _run(self) -> None:
        while True:
            try:
                self._follow()
            except ConfigError as error:
                self._say(f"tracker {self.name} is given up: {error}")
            except (Exception, SystemExit) as error:  # code of a library or of the user
                if self._waits_for_retry(f"{type(error).__name__}: {error}"):
                    continue
            self._busy_since = None
            return

    def _follow(self) -> None:
        self._busy_since = time.monotonic()
        feed = self._make()
        while True:
            is_last = self._ended.is_set()
            while self._deliver(feed):
                self._failures = 0
            if is_last:
                self._busy_since = time.monotonic()
                feed.close(self._status)
                return
            self._busy_since = None
            self._ended.wait(POLL_S)

    def _deliver(self, feed: Feed) -> int:
        self._busy_since = time.monotonic()
        return feed.deliver()

    def _waits_for_retry(self, problem: str) -> bool:
        """Say that the tracker failed. Returns True after the pause before the next try; False without one."""
        self._busy_since = None
        text = f"tracker {self.name} failed: {' '.join(problem.split())}"
        if self._ended.is_set() or self._failures == len(self._retry_s):
            self._say(f"{text}: {LATER}")
            return False
        pause = self._retry_s[self._failures]
        self._failures += 1
        if self._failures == 1:
            self._say(f"{text}: the run goes on, and the tracker is tried again")
        self._ended.wait(pause)
        return True


# ---- delivery of a step log to one tracker: each point once, in order, over all starts of the trial
#
#     steps.jsonl ──offset──> records ──> points, roll-backs ──> tracker.log, tracker.roll_back
#                                                                       └─ flush ──> trackers/NAME.json (offset)
#
# The position is written after the tracker has flushed. If the process is killed in between, the points since the last
# position are delivered twice; the built-in trackers discard the second ones where their library lets them.


#: records between two positions: few, because a tracker that takes them for a minute is taken for hanging
RECORDS_AT_ONCE = 50

#: Makes the tracker of a run.
Make = Callable[[Run], Tracker]


class Position(msgspec.Struct):
    """Progress of a tracker.

    offset     bytes of the step log that were delivered
    index      number of points
    delivered  kind -> greatest step of the points that hold
    state      ``Run.state``
    """

    offset: int = 0
    index: int = 0
    delivered: dict[str, int] = {}
    state: dict[str, Any] = {}


def read_position(path: Path) -> Position:
    """Return the position in ``path``; the beginning if the file is missing or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Position)
    except (OSError, msgspec.DecodeError):
        return Position()


class Feed:
    """A tracker and its position in the step log. Belongs to one thread."""

    def __init__(self, steps: Path, position: Path, run: Run, make: Make) -> None:
        """Make the tracker. ``run``: without ``delivered`` and ``state``, which are in the file ``position``.

        Raises what the tracker raises.
        """
        self._file = position
        self._at = read_position(position)
        if steps.exists() and steps.stat().st_size < self._at.offset:
            self._at = Position()  # another step log
        self._tail = StepTail(steps, self._at.offset)
        fields = {name: getattr(run, name) for name in ("experiment", "trial", "folder", "config", "version")}
        self._run = Run(**fields, delivered=dict(self._at.delivered), state=self._at.state)
        try:
            self._tracker = make(self._run)
        finally:
            self._save()  # its state, such as the id of its run: the next try continues it, also if this one failed

    def deliver(self) -> int:
        """Deliver what the step log has got since the last call, at most RECORDS_AT_ONCE. Returns their number."""
        taken, noted, offset = 0, 0, self._tail.offset
        for record in islice(self._tail.records(), RECORDS_AT_ONCE):
            # A tracker may rewrite its file at a roll-back. So one position is written before the
            # roll-back and one after it: after a crash in between no point is delivered twice.
            is_roll_back = record["kind"] == RECOVERED
            if is_roll_back and taken > noted:
                self._commit(offset)
            self._take(record)
            taken, offset = taken + 1, self._tail.offset
            if is_roll_back:
                self._commit(offset)
                noted = taken
        if taken > noted:
            self._commit(offset)
        return taken

    def _commit(self, offset: int) -> None:
        self._tracker.flush()
        self._at.offset = offset
        self._save()

    def close(self, status: str) -> None:
        """Close the tracker, which may hand over points only then, and save its state."""
        self._tracker.close(status)
        self._save()

    def _take(self, record: StepRecord) -> None:
        kind, step = record["kind"], step_of(record)
        if step is None:
            return
        if kind == RECOVERED:
            self._roll_back(step)
        elif kind in CURVES:
            when = record.get("time")
            time = float(when) if isinstance(when, int | float) else 0.0
            self._tracker.log(Point(kind, step, time, self._at.index, metrics_of(record)))
            self._at.index += 1
            # Evaluations of several sets do not ascend: the one that was due first may have newer weights.
            self._at.delivered[kind] = max(step, self._at.delivered.get(kind, step))

    def _roll_back(self, step: int) -> None:
        self._tracker.roll_back(step)
        for kind, last in list(self._at.delivered.items()):
            if kind == "warmup" and step < 0:
                del self._at.delivered[kind]
            elif kind != "warmup":
                self._at.delivered[kind] = min(last, max(step, -1))

    def _save(self) -> None:
        staged = self._file.with_suffix(".tmp")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        staged.write_bytes(msgspec.json.encode(self._at))
        os.replace(staged, self._file)


if __name__ == "__main__":
    main()
