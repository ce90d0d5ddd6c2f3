"""Parts of the train steps, from the step log alone. The parts of a step add up to its time, so shares add up to 100 %.

end of step k-1 ──between──> wait ──> inf, train (calls) ──> copy ──> publish ──> checkpoint ──> end of step k
                                                                 └ other: plans, statistics, requests
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realsys.observe.percent import whole_percents
from realsys.observe.step_log import RECOVERED, StepRecord, last_records, surviving

#: name of a part -> what the trainer does in it
PARTS: Mapping[str, str] = {
    "wait": "the batch is not complete: the trainer waits for generation",
    "inference": "calls that compute log-probs, values and scores",
    "train": "calls that train",
    "copy": "weights are copied to host memory",
    "publish": "the publication of the version before is not done, or the manager is told",
    "checkpoint": "checkpoint or export",
    "other": "plans, transfers, statistics",
    "between": "evaluations and what else lies between two steps",
}
#: name in the step log -> name of the part
_IN_LOG = {"wait": "wait", "inf": "inference", "train": "train", "save": "copy"} | {
    name: name for name in ("publish", "checkpoint")
}
#: bytes at the end of a step log that ``last_steps`` reads
_TAIL = 256 * 1024


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of one train step. ``parts``: seconds by name, in the order of PARTS; they add up to ``seconds``."""

    step: int
    end: float  # unix seconds
    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def share(self, part: str) -> float:
        return self.parts[part] / self.seconds if self.seconds else 0.0

    @property
    def percents(self) -> Mapping[str, int]:
        """Return the parts as whole percentages that add up to 100. Every text and table shows these."""
        return whole_percents(self.parts, self.seconds)


def step_times(records: Iterable[StepRecord]) -> list[StepTime]:
    """Return the times of the train records, in order. A record without readable times is left out."""
    times: list[StepTime] = []
    before: StepTime | None = None
    for record in records:
        if record["kind"] == RECOVERED or record.get("phase") == "connect":
            before = None  # the trainer started again: the time since the last step is no part of a step
        if record["kind"] == "train" and (made := _step_time(record, before)) is not None:
            times.append(made)
            before = made
    return times


def sum_of(times: Sequence[StepTime]) -> StepTime:
    """Return the sum of several steps as one, with the number of the last."""
    parts = {name: sum(time.parts[name] for time in times) for name in PARTS}
    return StepTime(times[-1].step if times else 0, times[-1].end if times else 0.0, parts)


def last_steps(path: Path, count: int) -> list[StepTime]:
    """Return the times of the last ``count`` train steps of a step log. Reads its end only; [] without a log."""
    records = last_records(path, _TAIL)
    return step_times(surviving(lambda: records))[-count:]


def _step_time(record: StepRecord, before: StepTime | None) -> StepTime | None:
    seconds, end, step = record.get("seconds"), record.get("time"), record.get("step")
    if not isinstance(seconds, dict) or not isinstance(end, int | float) or not isinstance(step, int):
        return None
    parts = dict.fromkeys(PARTS, 0.0)
    for name, part in _IN_LOG.items():
        parts[part] = max(0.0, _number(seconds.get(name)))
    total = max(_number(seconds.get("total")), sum(parts.values()))
    parts["other"] = total - sum(parts.values())
    if before is not None:
        parts["between"] = max(0.0, end - total - before.end)
    return StepTime(step, float(end), parts)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
