"""`realsys eval`: evaluates a model folder, the weights of a trial, or the servers of a trial that runs."""

from __future__ import annotations

from realsys.launch.evaluate.settings import Choices
from realsys.launch.evaluate.target import find_target


def evaluate(target: str, choices: Choices, step: int | None, *, live: bool) -> int:
    """Evaluate, print a table, and return the exit code. Raises RealsysError for bad input."""
    from realsys.launch.evaluate.run import evaluate_model

    return evaluate_model(find_target(target, step), choices)
