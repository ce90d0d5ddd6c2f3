"""Step logs of short runs, made by hand."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from realsys.config.paths import TrialPaths
from realsys.observe.step_fields import field_of, names

START = 1_700_000_000.0


def train_record(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "total": 4,
        "version": step,
        "time": START + 100 + 10 * step,
        "seconds": {"wait": 1.0, "inf": 2.0, "train": 3.0, "save": 0.5, "publish": 0.25, "total": 7.0},
        "groups": 64,
        "sequences": 512,
        "tokens": 30000,
        "answer_tokens": 20000,
        "reward_mean": 0.1 * step,
        "accuracy": 0.4 + 0.1 * step,
        "length_mean": 40.0 + step,
        "length_correct": 38.0,
        "length_wrong": None,
        "truncated_fraction": 0.0,
        "staleness": {"min": 0, "mean": 0.5, "max": 2, "histogram": {"0": 300, "1": 200, "2": 12}},
        "dropped_stale": 1,
        "train_tokens_per_s": 9000.0,
        "consumed_tokens_per_s": 4000.0,
        "lr": 1e-4,
        "stats": {"loss": 0.1, "grad_norm": 0.5},
        **changes,
    }


def run_records() -> list[dict[str, Any]]:
    def phase(name: str, at: float) -> dict[str, Any]:
        return {"kind": "phase", "phase": name, "time": START + at}

    def held_out(name: str, step: int, accuracy: float, at: float) -> dict[str, Any]:
        record = {"kind": "eval", "eval_id": name, "step": step, "problems": 512, "accuracy": accuracy}
        return {**record, "length_mean": 40.0, "seconds": 5.0, "time": START + at}

    warmup = {"kind": "warmup", "step": 1, "total": 1, "loss": 2.0, "tokens": 3000, "seconds": 0.5, "lr": 1e-3}
    return [
        phase("warmup", 0),
        {**warmup, "time": START + 1},
        phase("evaluate", 60),
        held_out("before", 0, 0.41, 65),
        phase("train", 100),
        *(train_record(step) for step in range(1, 5)),
        phase("evaluate", 150),
        held_out("after", 4, 0.835, 155),
        phase("done", 160),
    ]


def write_log(paths: TrialPaths, records: list[dict[str, Any]]) -> None:
    paths.steps.write_text("".join(json.dumps(record) + "\n" for record in records))


# ---- Step logs for tests of trackers, and the check that the table of fields has every field of a record


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
