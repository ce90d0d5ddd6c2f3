"""Where training starts: from this trial's newest good checkpoint, from another trial's, or from nothing.

    complete checkpoints, newest first ──verify──> the first good one      those that were not: set aside, named
              └ none yet ──> ``resume``, if the trial was started from one ──> else nothing, -1

The same question for a first start, a training side that was restarted while the servers stay up, and a run started
again: nothing but the disk decides. What is later than the answer is undone everywhere: the ledger re-issues it
(POST /roll_back), the step log gets a ``recovered`` record, weights of earlier incarnations are superseded.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realsys.errors import CheckpointError
from realsys.telemetry.steps import RECOVERED, StepRecord
from realsys.train.checkpoint import checkpoint_files as files
from realsys.train.checkpoint.checkpoint_files import CheckpointState

log = logging.getLogger(__name__)

NOTHING = -1  # the step, and version, before the first
_BESIDE = "step-"


@dataclass(frozen=True, slots=True)
class Start:
    """``checkpoint``: to load, None to begin with the base model; ``own``: it is of this trial. ``damaged``: newer ones
    that cannot be used, and why.
    """

    checkpoint: Path | None = None
    step: int = NOTHING
    own: bool = False
    damaged: dict[Path, str] = field(default_factory=dict)


def decide(complete: Sequence[tuple[int, Path]], resume: str, examine: Callable[[Path], CheckpointState]) -> Start:
    """``complete``: (step, folder) of this trial's checkpoints, oldest first. ``examine`` proves one or raises
    CheckpointError.

    Raises CheckpointError when there are some and none of them is good: to start from nothing then is the user's
    decision, for it costs all that was trained.
    """
    damaged: dict[Path, str] = {}
    for _, path in reversed(complete):
        try:
            return Start(path, examine(path).version, own=True, damaged=damaged)
        except CheckpointError as error:
            damaged[path] = str(error)
    if damaged:
        whole = CheckpointError(
            f"master_worker: no checkpoint of this trial can be used: {'; '.join(damaged.values())}; "
            f"remove {next(iter(damaged)).parent} to start again without them"
        )
        whole.permanent = True
        raise whole
    if resume:
        return Start(Path(resume), examine(Path(resume)).version)
    return Start()


def find_start(root: Path, resume: str) -> Start:
    """``decide`` for the checkpoints under ``root``; what is damaged is named in the log, and set aside."""
    began = time.perf_counter()
    start = decide(files.complete_checkpoints(root), resume, files.verify)
    for path, problem in start.damaged.items():
        aside = path.with_name(f"{path.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        log.error("checkpoint %s cannot be used, the one before it is taken: %s; it is %s now", path, problem, aside)
    if start.checkpoint is not None:
        took = time.perf_counter() - began
        log.info("training goes on from %s, version %d; verified in %.3f s", start.checkpoint, start.step, took)
    return start


def recovered_record(start: Start, incarnation: str) -> dict[str, Any]:
    """For the step log: what comes before it and is later than ``start`` does not hold any more."""
    return {"kind": RECOVERED, "step": start.step, "incarnation": incarnation, "time": time.time()}


def evaluated(records: Iterable[StepRecord], eval_id: str, step: int) -> bool:
    """Whether this evaluation of the weights of ``step`` is in the step log."""
    found = ((record.get("eval_id"), record.get("step")) for record in records if record["kind"] == "eval")
    return (eval_id, step) in found


def eval_id_of(step: int) -> str:
    """Name of the evaluation beside training that is due after ``step``."""
    return f"{_BESIDE}{step}"


def unanswered(records: Iterable[StepRecord], asked: Iterable[str], done: int) -> list[int]:
    """Steps up to ``done`` whose evaluation beside training has no result in the step log: those that were asked for,
    and the one of ``done`` itself, before which the training side may have died.

    Which weights a result is of is not asked here: those of an earlier step are gone, and what is asked for again is
    answered with those of ``done``.
    """
    answered = {record.get("eval_id") for record in records if record["kind"] == "eval"}
    numbers = (eval_id.removeprefix(_BESIDE) for eval_id in asked if eval_id.startswith(_BESIDE))
    steps = {done, *(int(number) for number in numbers if number.isdecimal())}
    return sorted(step for step in steps if step <= done and eval_id_of(step) not in answered)


def has_trained(records: Iterable[StepRecord]) -> bool:
    """Whether a step of this trial still holds."""
    return any(record["kind"] == "train" for record in records)
