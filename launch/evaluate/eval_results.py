"""Results of an evaluation: results.json, and a table for people. An incomplete evaluation has a reason, no numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realsys.config.paths import TrialPaths
from realsys.errors import RecordError
from realsys.launch.arguments.words import command_line
from realsys.observe.evaluation_records import incomplete_reason, omissions, read_samples
from realsys.observe.percent import percent, percentage

Result = Mapping[str, Any]
_FILE = "results.json"
_NONE = "-"


def with_lengths(record: Result, paths: TrialPaths, eval_id: str) -> dict[str, Any]:
    """Add to the step log's record where its completions are, and the share of them that was cut off (None: unknown).

    ``eval_id``: the name by which the manager knows the evaluation.
    """
    folder = paths.evaluations / eval_id
    try:
        reasons = [sample.finish_reason for sample in read_samples(folder)]
    except RecordError:  # the disk was full: the record of the step log is the result all the same
        reasons = []
    cut = reasons.count("length") / len(reasons) if reasons else None
    return {**record, "completions": len(reasons), "cut_off": cut, "folder": str(folder)}


def report(paths: TrialPaths, folder: Path, about: Mapping[str, Any], records: Mapping[str, Result]) -> int:
    """Write results.json into ``folder`` and print the table. Returns 1 if an evaluation is incomplete, else 0.

    ``records``: of the step log, by the name under which the trial at ``paths`` stores their completions.
    """
    results = [with_lengths(record, paths, eval_id) for eval_id, record in records.items()]
    path = write_results(folder, about, results)
    shown = (f"completions  {command_line('samples', paths.root, '--eval', name)}" for name in records)
    for line in [*table(results), f"results      {path}", *shown]:
        print(line)
    return int(any(map(incomplete_reason, results)))


def write_results(folder: Path, about: Mapping[str, Any], results: Sequence[Result]) -> Path:
    """Write results.json into ``folder``: ``about`` the model, and the results by data set. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _FILE
    staged = path.with_suffix(".tmp")
    staged.write_text(json.dumps({**about, "results": list(results)}, indent=2) + "\n", encoding="utf-8")
    staged.replace(path)
    return path


def table(results: Sequence[Result]) -> list[str]:
    """Return the lines of the table, a line per data set. They are not wrapped."""
    ks = sorted({int(k) for result in results for k in result["pass_at"]} - {1})
    has_votes = any(result.get("majority") for result in results)
    head = ["data set", "problems", "samples", "accuracy", *(f"pass@{k}" for k in ks)]
    head += [*(["majority"] if has_votes else []), "cut off", "mean length", "failed", "version"]
    rows = [_row(result, ks, has_votes=has_votes) for result in results]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    notes = [f"{result['set']}: incomplete: {reason}" for result in results if (reason := incomplete_reason(result))]
    notes += [f"{result['set']}: {phrase}" for result in results for phrase in omissions(result)]
    return [line.rstrip() for line in lines] + notes


def _row(result: Result, ks: Sequence[int], *, has_votes: bool) -> list[str]:
    shares = [_share(result["pass_at"].get(str(k))) for k in ks]
    shares += [_share(result.get("majority"))] if has_votes else []
    cut, length = result.get("cut_off"), result["length_mean"]
    return [
        result["set"],
        str(result["problems"]),
        str(result["samples"]),
        _share(result["pass_at"].get("1")),
        *shares,
        _NONE if cut is None else percent(cut),
        f"{length:.0f}",
        str(result["failed"]),
        str(result["version"]),
    ]


def _share(value: Mapping[str, float] | None) -> str:
    """Return a share with its interval: ``43.8 % (35.5 - 52.4)``."""
    if value is None:
        return _NONE
    return f"{percent(value['value'])} ({percentage(value['low'])} - {percentage(value['high'])})"
