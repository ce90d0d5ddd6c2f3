"""Completions of evaluations on disk."""

from __future__ import annotations

import msgspec
import pytest

from realsys.errors import RecordError
from realsys.observe.evaluation_records import (
    EvalSample,
    append_sample,
    collect,
    read_result,
    read_samples,
    stored_evaluations,
    write_result,
)

FIRST = EvalSample("e", "eval", 0, 0, 0, 3, 3, "1+1=", "#2", "2", 5.0, True, "stop", 3, "2")


def of(**changes) -> EvalSample:
    return msgspec.structs.replace(FIRST, **changes)


def test_only_completions_that_count_are_kept(tmp_path):
    """An attempt that was superseded is in the parts, too, and its worker may be another one."""
    for worker, sample in (
        ("rollout_worker/0", of(attempt=0)),
        ("rollout_worker/1", of(attempt=1, completion="#3")),
        ("rollout_worker/0", of(problem=1, sample=1)),
        ("rollout_worker/0", of(problem=1, sample=0)),
    ):
        append_sample(tmp_path, worker, sample)
    kept = collect(tmp_path, [(1, 1, 0), (0, 0, 1), (1, 0, 0), (7, 0, 0)])
    assert [sample.unit for sample in kept] == [(0, 0, 1), (1, 0, 0), (1, 1, 0)]
    write_result(tmp_path, kept, {"accuracy": 0.5})
    assert read_samples(tmp_path) == kept and read_result(tmp_path) == {"accuracy": 0.5}
    assert {path.name for path in tmp_path.iterdir()} == {"samples.jsonl", "result.json"}
    write_result(tmp_path, collect(tmp_path, [sample.unit for sample in kept]), {})
    assert read_samples(tmp_path) == kept, "the trainer died before it logged the result, and stores it again"


def test_line_that_was_cut_off_is_no_completion(tmp_path):
    append_sample(tmp_path, "w", FIRST)
    with (tmp_path / "parts" / "w.jsonl").open("ab") as part:
        part.write(msgspec.json.encode(of(problem=1))[:-5])
    assert collect(tmp_path, [FIRST.unit, (1, 0, 0)]) == [FIRST]


def test_changed_line_is_named(tmp_path):
    write_result(tmp_path, [FIRST], {})
    (tmp_path / "samples.jsonl").write_bytes(b"{}\n")
    with pytest.raises(RecordError, match=r"samples.jsonl:1: is not a completion"):
        read_samples(tmp_path)


def test_unfinished_evaluation_has_no_samples(tmp_path):
    append_sample(tmp_path / "e", "w", FIRST)
    assert stored_evaluations(tmp_path) == []
    with pytest.raises(RecordError, match="has not ended"):
        read_samples(tmp_path / "e")
    with pytest.raises(RecordError, match="cannot be read"):
        read_result(tmp_path / "e")
