"""Lines about an evaluation that runs."""

from __future__ import annotations

from rich.console import Console

from realsys.observe.screen.plain import EvaluationView, progress_line
from realsys.observe.screen.progress import TrialProgress


def state(done: int, failed: int = 0) -> dict[str, int]:
    return {"done": done, "failed": failed, "total": 64}


def test_progress_names_unfinished_evaluations() -> None:
    evaluations = {"eval-0": state(10), "eval-0.aime": state(3, 1), "eval-0.done": state(64)}
    assert progress_line(evaluations) == "eval-0 10/64, eval-0.aime 4/64 (1 failed)"


def test_manager_without_evaluations_has_no_line() -> None:
    assert progress_line(None) == "" and progress_line({}) == "" and progress_line({"a": {}}) == ""


def test_same_progress_is_shown_once() -> None:
    console = Console(record=True, width=80)
    progress = TrialProgress(status={"evaluations": {"eval-0": state(10)}})
    view = EvaluationView(console)
    view.refresh(progress)
    view.refresh(progress)
    assert console.export_text() == "eval-0 10/64\n"
