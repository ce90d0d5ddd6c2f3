"""Step logs for tests of trackers, and the check that the table of fields has every field of a record."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from realsys.observe.step_fields import field_of, names


def train(step: int, **fields: Any) -> dict[str, Any]:
    """Return a record of a train step. Its reward is 10 times the step."""
    return {"kind": "train", "step": step, "version": step, "time": 1000.0 + step, "reward_mean": 10.0 * step, **fields}


def evaluation(step: int, **fields: Any) -> dict[str, Any]:
    record = {"kind": "eval", "set": "eval", "step": step, "version": step, "time": 1000.5 + step, "complete": True}
    return {**record, "accuracy": step / 100, **fields}


def warmup(step: int) -> dict[str, Any]:
    return {"kind": "warmup", "step": step, "time": 900.0 + step, "loss": 1.0 / step}


def recovered(step: int) -> dict[str, Any]:
    return {"kind": "recovered", "step": step, "incarnation": "2", "time": 2000.0}


def append(path: Path, *records: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def undocumented(records: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the fields that the table lacks. The entry for statistics of users' calls does not count."""
    found = ((str(record["kind"]), name) for record in records for name in names(record))
    return {f"{kind}: {name}" for kind, name in found if _is_unknown(kind, name)}


def _is_unknown(kind: str, name: str) -> bool:
    entry = field_of(kind, name)
    return entry is None or entry.field.name == "stats/{name}"
