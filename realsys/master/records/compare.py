"""Comparison of a recorded step with its replay, bit by bit or within a tolerance. Pure.

plan, calls ──> scores, statistics, arrays that the calls made ──> parameters after the step
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from realsys.master.records.agreement import PREFIX as AGREEMENT
from realsys.model_calls import SNAPSHOT
from realsys.train.data_manager import Array
from realsys.train.records.record_files import Arrays, StepRecord, checksum


class Difference(msgspec.Struct, frozen=True):
    """The first unequal item of its kind."""

    what: str  # kind: plan, statistic, ...
    name: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"{self.what} {self.name}: recorded {self.recorded}, replayed {self.replayed}"


class Comparison(msgspec.Struct, frozen=True):
    """Result for one step.

    compared  kind -> number of compared items
    unequal   kind -> number of unequal items
    first     first difference of each kind that has one
    """

    step: int
    sequences: int
    compared: dict[str, int]
    unequal: dict[str, int]
    first: list[Difference]
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        return not self.first


def compare(
    recorded: StepRecord, replayed: StepRecord, arrays: Arrays, replayed_arrays: Arrays, tolerance: float = 0.0
) -> Comparison:
    """Compare everything of a step.

    With a ``tolerance`` numbers may differ by that much, relative or absolute, whichever allows more. Parameters
    are then left out, because their checksums do not say how far apart they are.

    The kinds are in the order in which each produces the next, so the first difference is nearest to the
    cause.
    """
    kinds: dict[str, tuple[Mapping[Any, Any], Mapping[Any, Any]]] = {
        "plan": ({"of the batch": recorded.plan}, {"of the batch": replayed.plan}),
        "call": (dict.fromkeys(recorded.calls, "run"), dict.fromkeys(replayed.calls, "run")),
        "score": (recorded.scores, replayed.scores),
        "array": (_named(arrays), _named(replayed_arrays)),
        "statistic": (dict(_statistics(recorded)), dict(_statistics(replayed))),
    }
    if not tolerance:
        kinds["parameter"] = (dict(_parameters(recorded)), dict(_parameters(replayed)))
    compared: dict[str, int] = {}
    unequal: dict[str, int] = {}
    first: list[Difference] = []
    for what, (ours, theirs) in kinds.items():
        names = list(dict.fromkeys([*ours, *theirs]))
        different = [name for name in names if not _same(ours.get(name), theirs.get(name), tolerance)]
        if names:
            compared[what], unequal[what] = len(names), len(different)
        if different:
            name = different[0]
            first.append(Difference(what, name, *_shown(ours.get(name), theirs.get(name))))
    sequences = sum(len(group) for group in recorded.groups)
    return Comparison(recorded.step, sequences, compared, unequal, first)


def _named(arrays: Arrays) -> dict[str, Array]:
    return {f"{key} of sample {sample_id}": array for (sample_id, key), array in sorted(arrays.items())}


def _statistics(record: StepRecord) -> Iterator[tuple[str, Any]]:
    for call, stats in record.stats.items():
        # Such tokens were scored with weights of an earlier version, which a replay does not have.
        scored_older = bool(record.args.get(call, {}).get(SNAPSHOT, {}).get("samples"))
        for name, value in stats.items():
            if not (scored_older and name.startswith(AGREEMENT)):
                yield f"{call}/{name}", value


def _parameters(record: StepRecord) -> Iterator[tuple[str, str]]:
    for role, by_worker in record.weights.items():
        for worker, digests in sorted(by_worker.items()):
            for name, value in digests.items():
                yield f"{role} on model_worker/{worker}: {name}", value


def _same(ours: Any, theirs: Any, tolerance: float) -> bool:
    if tolerance and _are_numbers(ours, theirs):
        return bool(np.allclose(theirs, ours, rtol=tolerance, atol=tolerance, equal_nan=True))
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and checksum(ours) == checksum(theirs)
    # repr distinguishes -0.0 from 0.0, which == does not
    return type(ours) is type(theirs) and repr(ours) == repr(theirs)


def _are_numbers(ours: Any, theirs: Any) -> bool:
    """Return True for two floats, and for two arrays of them of the same shape."""
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        return bool(ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.dtype.kind == "f")
    return isinstance(ours, float) and isinstance(theirs, float)


def _shown(ours: Any, theirs: Any) -> tuple[str, str]:
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray) and len(ours) == len(theirs):
        bytes_of = (np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1) for a in (ours, theirs))
        at = int(np.argmax(np.any(np.not_equal(*bytes_of), axis=1)))
        return f"{ours[at]!r} at token {at}", f"{theirs[at]!r}"
    return _text(ours), _text(theirs)


def _text(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"{len(value)} elements" if isinstance(value, np.ndarray) else str(value)
