"""Cost of watching a run: the arith job with everything that shows what it does, against itself without.

    python -m benchmarks.telemetry [--pairs 4] [--steps 80] [--groups 16] [--override KEY=VALUE ...]

Pairs of runs, ``on`` and ``off``, on one training rank and one server (``_pairs.py``). The policy does not learn, so
the completions of both are equally long.

    on    spans, the default trackers, samples and dropped groups, ``curves.png`` every 100 s (by default every 300 s),
          a client that reads what an open status page reads, every 2 s, and /metrics every 15 s
    off   none of it

    tokens_per_s   sampled tokens that training consumed, per second, from the end of step SKIP to the end of the last
    cpu_s_per_1k   CPU seconds of all processes of the run, from its start to its end, per 1,000 of these tokens
    spans, mib     of all processes of the run
    page           times that the client read the status page
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._pairs import Side, add_arguments, compare
from realsys.config.paths import TrialPaths
from realsys.launch.commands.status import Observer
from realsys.observe.timeline.clocked_spans import read_timeline

PAGE_S, SCRAPE_EVERY = 2.0, 8  # as the page does, and about as often as Prometheus by default
CURVES_S = 100
STILL = "train.optimizer.lr=1e-12"  # the policy does not learn
ON = (STILL, f"telemetry.curves_every_s={CURVES_S}")  # the rest is the default
OFF = (
    STILL,
    "telemetry.spans=false",
    "telemetry.trackers=[]",
    "telemetry.curves_every_s=0",
    "record.keep_steps=0",
    "record.dropped_groups=0",
)


class Watcher:
    """A status page that is open while a run lasts, and a Prometheus."""

    def __init__(self) -> None:
        self.seen = 0

    @contextlib.contextmanager
    def watch(self, paths: TrialPaths) -> Iterator[None]:
        self.seen, ended = 0, threading.Event()
        thread = threading.Thread(target=self._read, args=(paths, ended))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _read(self, paths: TrialPaths, ended: threading.Event) -> None:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # not only the cores of the run that is watched
        address = None
        while not address and not ended.wait(PAGE_S):
            address = paths.config.exists() and Observer(paths).look().as_json()["status_page"]
        drawn = -1
        for turn in itertools.count():
            if ended.wait(PAGE_S):
                return
            with contextlib.suppress(OSError):  # the run has not begun to answer, or has just ended
                _get(f"{address}view/run")
                drawn = json.loads(_get(f"{address}view/curves?seen={drawn}")).get("seen", drawn)
                _get(f"{address}view/live")
                if turn % SCRAPE_EVERY == 0:
                    _get(f"{address}metrics")
                self.seen += 1


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20) as answer:
        body: bytes = answer.read()
        return body


def sides(root: Path) -> tuple[Side, Side]:
    watcher = Watcher()

    def check_on(paths: TrialPaths) -> dict[str, Any]:
        if not watcher.seen or not paths.curves.exists() or not any(paths.root.rglob("events.out.tfevents.*")):
            raise SystemExit(f"{paths.root}: the status page was read {watcher.seen} times, or curves or trackers lack")
        size = sum(path.stat().st_size for path in paths.spans.rglob("*") if path.is_file())
        return {"spans": len(read_timeline(paths.spans).spans), "mib": round(size / 2**20, 2), "page": watcher.seen}

    def check_off(paths: TrialPaths) -> dict[str, Any]:
        if paths.spans.exists() or any(paths.root.rglob("events.out.tfevents.*")):
            raise SystemExit(f"{paths.root}: something was recorded though everything was off")
        return {}

    return Side("on", check=check_on, overrides=ON, beside=watcher.watch), Side("off", check=check_off, overrides=OFF)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    compare("telemetry", parser.parse_args(), sides)


if __name__ == "__main__":
    main()
