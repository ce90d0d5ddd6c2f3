"""A whole job with two data sets of evaluations: several samples per problem and greedy, during training, too."""

import json
from pathlib import Path

import pytest

from realsys.observe.evaluation_records import read_result, read_samples, stored_evaluations
from tests.support.jobs.jobs import run_arith

pytestmark = pytest.mark.system
STEPS = 3
PROBLEMS = [{"prompt": f"a{x}b{y}=", "answer": f"{x + y}"} for x in (3, 4) for y in (1, 2, 5)]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A finished run: the held-out problems with n=4, problems of a file greedily."""
    root: Path = tmp_path_factory.mktemp("evaluated")
    file = root / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    own = f"path:{file},samples:1,k:[],sampling:{{temperature:0}},every_steps:1"
    settings = [
        f"train.total_steps={STEPS}",
        "evaluation.samples=4",
        "evaluation.k=[2,4]",
        "evaluation.every_steps=2",
        "evaluation.every_problems=8",
        f"evaluation.sets={{sums:{{{own}}}}}",
    ]
    return run_arith(root, "evaluated", *settings).completed()


def test_each_set_has_its_evaluations(evaluated):
    records = {record["eval_id"]: record for record in evaluated.records("eval")}
    during = {"step-1.sums", "step-2", "step-2.sums"}
    assert records.keys() == {"before", "before.sums", "after", "after.sums"} | during
    for record in records.values():
        assert record["complete"] and record["failed"] == 0, record
        assert record["version_min"] == record["version_max"], "the samples of an evaluation are of one version"
        assert record["interval"][0] <= record["accuracy"] <= record["interval"][1]
    assert [records[name]["problems"] for name in ("before", "step-2", "after.sums")] == [16, 8, len(PROBLEMS)]
    assert [*records["after"]["pass_at"]] == ["1", "2", "4"] and [*records["after.sums"]["pass_at"]] == ["1"]


def test_completions_of_evaluations_are_stored(evaluated):
    root = evaluated.paths.evaluations
    assert len(stored_evaluations(root)) == 7
    samples = read_samples(root / f"after-{STEPS}")
    assert [(s.problem, s.sample) for s in samples] == [(p, k) for p in range(16) for k in range(4)]
    result = read_result(root / f"after-{STEPS}")
    assert sum(bool(s.correct) for s in samples) / len(samples) == pytest.approx(result["accuracy"])
    assert len({s.completion for s in samples if s.problem == 0}) > 1, "samples of a problem have different seeds"


def test_set_of_a_file_has_its_references(evaluated):
    samples = read_samples(evaluated.paths.evaluations / f"after-{STEPS}.sums")
    assert [s.problem for s in samples] == [*range(len(PROBLEMS))] and {s.set for s in samples} == {"sums"}
    assert [s.reference for s in samples] == [row["answer"] for row in PROBLEMS]


def test_terminal_shows_interval_and_numbers_asked(evaluated):
    assert "evaluation before: accuracy " in evaluated.stdout and "(16 problems x 4)" in evaluated.stdout
    assert "evaluation after.sums" in evaluated.stdout and f"({len(PROBLEMS)} problems)" in evaluated.stdout
