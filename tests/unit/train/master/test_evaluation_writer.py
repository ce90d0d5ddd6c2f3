"""Results of evaluations as the master stores them, with the majority vote."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from realsys.config.evaluation_sets import evaluation_sets
from realsys.manager.messages import EvaluationReply
from realsys.observe.evaluation_records import EvalSample, append_sample, headline, read_result, read_samples, record
from realsys.reward.pool import AnswerComparer
from realsys.train.master import request_evaluations
from realsys.train.master.request_evaluations import ResultWriter, outcome_of
from tests.support.processes.config_trees import changed

ANSWERS = ("7", r"\frac{1}{2}", "0.5")  # one right answer, and two wrong ones that agree


def write(root: Path, verifier: str, incomplete: str = "", lost: int = 0) -> dict[str, Any]:
    """Store an evaluation of one problem with three samples, of which ``lost`` never reached the disk."""
    config = changed(f"data.verifier={verifier}", "evaluation.samples=3", "evaluation.problems=1")
    for number, answer in enumerate(ANSWERS[lost:], lost):
        text = f"\\boxed{{{answer}}}"
        verdict = 5.0, answer == "7", "stop", 3, answer
        append_sample(root / "e", "w", EvalSample("e", "eval", 0, number, 0, 2, 2, "q", text, "7", *verdict))
    state = EvaluationReply(3, 3, 0, 1 / 3, 1.0, 3.0, 2, 2, ended=True, incomplete=incomplete, tallies=[(3, 1, 1)])
    state.accepted = [(0, number, 0) for number in range(3)]
    made = evaluation_sets(config)["eval"]
    result = record("e", 2, made, outcome_of(state), 1.0)
    return ResultWriter(config, root).write("e", made, result, state)


@pytest.mark.processes
@pytest.mark.parametrize(("verifier", "share"), [("math", 0.0), ("exact", 1 / 3)])
def test_votes_agree_as_the_verifier_says(tmp_path: Path, verifier: str, share: float):
    result = write(tmp_path, verifier)
    assert result["majority"]["value"] == pytest.approx(share)
    assert read_result(tmp_path / "e") == result and len(read_samples(tmp_path / "e")) == 3


def test_incomplete_evaluation_has_no_vote(tmp_path: Path):
    assert "majority" not in write(tmp_path, "exact", "1 of 3 failed")
    assert read_result(tmp_path / "e")["accuracy"] is None


def test_vote_needs_every_stored_completion(tmp_path: Path):
    result = write(tmp_path, "exact", lost=1)
    assert "majority" not in result and result["accuracy"] == pytest.approx(1 / 3)


def test_vote_over_its_time_limit_is_omitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A comparison of many answers must not delay the end of a run without a bound."""
    monkeypatch.setattr(request_evaluations, "AnswerComparer", functools.partial(AnswerComparer, limit_s=-1.0))
    result = write(tmp_path, "math")
    assert result["majority"] is None and result["accuracy"] == pytest.approx(1 / 3)
    assert "no majority: comparing the final answers took more than" in headline(result)
    assert "has no majority vote" in caplog.text


def test_result_that_cannot_be_stored_is_returned(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "samples.jsonl").mkdir()
    result = write(tmp_path, "exact")
    assert result["accuracy"] == pytest.approx(1 / 3) and "cannot be stored" in caplog.text
