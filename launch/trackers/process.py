"""The process of the trackers: a thread for each, below the launcher (``realsys.launch.trackers.link``).

    reads    Order from a descriptor, Ended from stdin       writes   reports to a descriptor; both are arguments
    ends     when all trackers have finished or hang, after ``finish_s``, or with the launcher

A process and not threads of the launcher: a library may hold the GIL, print, crash, or hang in a handler at exit.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from realsys.cluster.prctl import die_with_parent
from realsys.config.doors import TRACKER
from realsys.launch.trackers.follower import LATER, Follower
from realsys.launch.trackers.messages import LONGEST_TEXT, Ended, Order, Report, line
from realsys.telemetry.trackers.base import Run
from realsys.telemetry.trackers.feed import Feed

_LOOK_S = 1.0
_NICENESS = 10  # a busy machine serves the run first


def main() -> None:
    with open(int(sys.argv[1]), "rb") as file:
        file.seek(0)
        order = msgspec.json.decode(file.read(), type=Order)
    if not die_with_parent(signal.SIGKILL, order.parent):
        return
    os.nice(_NICENESS)
    for number in (signal.SIGTERM, signal.SIGINT):  # a batch system may signal every process; the launcher decides
        signal.signal(number, lambda *_: None)
    reports = int(sys.argv[2])
    os.set_inheritable(reports, False)  # the launcher reads until all writers have ended

    def say(text: str) -> None:
        os.write(reports, line(Report(text[:LONGEST_TEXT])))  # one call: threads do not mix their lines

    followers = [Follower(name, partial(_feed, order, name), say) for name in order.trackers]
    for follower in followers:
        follower.start()
    ended = _wait_for_end(followers)
    _finish(followers, ended, say)
    sys.stdout.flush()
    os._exit(0)  # without the handlers of libraries, which may wait for a server


def _feed(order: Order, name: str) -> Feed:
    """Return the tracker ``name`` at its position. Raises ConfigError, and what the tracker raises."""
    folder = Path(order.folder)
    position = folder / "trackers" / f"{name.replace(':', '.')}.json"
    run = Run(order.experiment, order.trial, folder, order.config, order.version)
    make = TRACKER.load(name)
    return Feed(folder / "steps.jsonl", position, run, lambda told: make(told, **order.trackers[name]))


def _wait_for_end(followers: list[Follower]) -> Ended:
    """Wait for the end of the run, and say which tracker hangs."""
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        for follower in followers:
            follower.is_hanging(time.monotonic())
    text = sys.stdin.buffer.readline()
    return msgspec.json.decode(text, type=Ended) if text else Ended("", 0.0)


def _finish(followers: list[Follower], ended: Ended, say: Callable[[str], None]) -> None:
    """Have the trackers finish; say which of them did not, and leave those that hang alone."""
    for follower in followers:
        follower.end(ended.status)
    deadline = time.monotonic() + ended.finish_s
    for follower in followers:
        left = 0.0 if follower.is_hanging(time.monotonic()) else deadline - time.monotonic()
        if not follower.join(max(0.0, left)):
            say(f"tracker {follower.name} did not finish within {ended.finish_s:g} s: {LATER}")


if __name__ == "__main__":
    main()
