"""Finds a stored evaluation by its id or the name of its data set."""

from __future__ import annotations

from pathlib import Path

from realsys.errors import RecordError
from realsys.observe.evaluation_records import read_result, stored_evaluations


def chosen_evaluation(root: Path, eval_id: str = "", of_set: str = "") -> str:
    """Return the name of an evaluation: the newest of ``eval_id`` and ``of_set``, "" for any. Raises RecordError naming
    those that are stored.
    """
    stored = stored_evaluations(root)
    if of_set:
        stored = [name for name in stored if read_result(root / name).get("set") == of_set]
    if not stored:
        of = f" of set {of_set!r}" if of_set else ""
        raise RecordError(f"{root}: no evaluation{of} has stored completions")
    if not eval_id:
        return stored[-1]
    if eval_id in stored:
        return eval_id
    # The step log calls the one of step 40 at the end "after"; the newest of that name is meant.
    named = [name for name in stored if read_result(root / name).get("eval_id") == eval_id]
    if not named:
        raise RecordError(f"{root}: no evaluation {eval_id!r} is stored: use one of {', '.join(stored)}")
    return named[-1]
