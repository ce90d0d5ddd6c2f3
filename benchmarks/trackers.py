"""CPU time of the default trackers: their process below a launcher, and a step log that grows.

The log gets records with every field of the table of fields. The process does not know them beforehand. The share is
that of a run with steps of ``--step-s`` seconds on this machine.

    python -m benchmarks.trackers [--steps 300] [--rate 20] [--idle-s 20] [--step-s 0.5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._table import report
from realsys.config.compose import compose
from realsys.config.paths import TrialPaths
from realsys.observe.step_fields import TRAIN
from realsys.observe.trackers.link import Trackers


def record(step: int) -> dict[str, Any]:
    """Return the record of a train step with all of its numbers."""
    made: dict[str, Any] = {"kind": "train", "time": time.time(), "step": step, "version": step}
    for field in TRAIN.values():
        if field.tracked:
            *path, name = field.name.replace("{", "").replace("}", "").split("/")
            place = made
            for part in path:
                place = place.setdefault(part, {})
            place[name] = step * 1.234567
    return made


def cpu_s(pid: int) -> float:
    """Return the CPU time of all threads of a process, to the nanosecond."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return CPU seconds of the start, of all steps, and of waiting."""
    config = compose(["experiment=arith", f"fileroot={folder}", "trial=t"])
    paths = TrialPaths.of(config)
    paths.root.mkdir(parents=True)
    async with Trackers(config, paths, print) as trackers:
        assert trackers._child is not None
        process = trackers._child.pid
        await asyncio.sleep(3.0)
        started = cpu_s(process)
        with paths.steps.open("a") as log:
            for step in range(1, options.steps + 1):
                print(json.dumps(record(step)), file=log, flush=True)
                await asyncio.sleep(1 / options.rate)
        await asyncio.sleep(4.0)  # the last are delivered
        delivered = cpu_s(process)
        await asyncio.sleep(options.idle_s)
        idle = cpu_s(process)
        trackers.status = "done"
    lines = len(paths.metrics.read_text().splitlines())
    if lines != options.steps:
        raise ValueError(f"{lines} of {options.steps} steps were delivered")
    return {"start": started, "steps": delivered - started, "idle": idle - delivered}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--idle-s", type=float, default=20.0)
    parser.add_argument("--step-s", type=float, default=0.5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = asyncio.run(measure(Path(folder), options))
    per_step = seconds["steps"] / options.steps
    per_second = per_step / options.step_s + seconds["idle"] / options.idle_s
    rows = [
        {"what": "start of the process", "cpu_s": seconds["start"]},
        {"what": "a train step", "cpu_s": per_step},
        {"what": "an hour without a step", "cpu_s": 3600 * seconds["idle"] / options.idle_s},
        {"what": "share of the machine while training", "share": per_second / (os.cpu_count() or 1)},
    ]
    numbers = sum(field.tracked for field in TRAIN.values())
    report("trackers", rows, {"numbers": numbers, "step_s": options.step_s})


if __name__ == "__main__":
    main()
