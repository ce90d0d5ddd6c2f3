"""Start of training: from this trial's newest good checkpoint, from another trial's, or from the base model.

    complete checkpoints, newest first ──verify──> the first good one; damaged ones are set aside
              └ none yet ──> ``resume``, if the trial was started from one ──> else nothing, -1

Only the disk decides, and it decides in the same way for a first start, for a trainer that restarts
while the servers stay up, and for a run that is started again. Everything later than the start is then
undone: the ledger reissues its tickets (POST /roll_back), the step log gets a ``recovered`` record, and
the weights of this incarnation supersede those of earlier ones (``monotonic``).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from realsys.config.evaluation_sets import EvaluationSet, id_of_set
from realsys.errors import MALFORMED, CheckpointError, ConfigError
from realsys.observe.step_log import RECOVERED, StepRecord
from realsys.train.checkpoint import checkpoint_files as files
from realsys.train.checkpoint.checkpoint_files import CHECKPOINT, CheckpointState

log = logging.getLogger(__name__)

NOTHING = -1  # step and version before the first
_EVAL_PREFIX = "step-"


@dataclass(frozen=True, slots=True)
class TrainingStart:
    """State that training starts from.

    checkpoint  folder to load; None: the base model
    step        its step, which is its version, too
    own         True if the checkpoint is of this trial
    damaged     newer checkpoints that cannot be used -> reason
    """

    checkpoint: Path | None = None
    step: int = NOTHING
    own: bool = False
    damaged: dict[Path, str] = field(default_factory=dict)


def decide(
    complete: Sequence[tuple[int, Path]], resume: str, examine: Callable[[Path], CheckpointState]
) -> TrainingStart:
    """Choose the start of training.

    ``complete``: (step, folder) of this trial's checkpoints, oldest first. ``examine`` verifies one, or
    raises CheckpointError.

    Raises CheckpointError if this trial has checkpoints and none is good: starting from nothing would
    lose everything that was trained, so the user must decide that.
    """
    damaged: dict[Path, str] = {}
    for _, path in reversed(complete):
        try:
            return TrainingStart(path, examine(path).version, own=True, damaged=damaged)
        except CheckpointError as error:
            damaged[path] = str(error)
    if damaged:
        failure = CheckpointError(
            f"master_worker: no checkpoint of this trial can be used: {'; '.join(damaged.values())}; "
            f"remove {next(iter(damaged)).parent} to start again without them"
        )
        failure.permanent = True
        raise failure
    if resume:
        return TrainingStart(Path(resume), examine(Path(resume)).version)
    return TrainingStart()


def find_start(root: Path, resume: str) -> TrainingStart:
    """Run ``decide`` for the checkpoints under ``root``; log the damaged ones, and set them aside."""
    began = time.perf_counter()
    start = decide(files.complete_checkpoints(root), resume, files.verify)
    for path, problem in start.damaged.items():
        aside = CHECKPOINT.set_aside(path)
        log.error("checkpoint %s cannot be used, the one before it is taken: %s; it is %s now", path, problem, aside)
    if start.checkpoint is not None:
        took = time.perf_counter() - began
        log.info("training continues from %s, version %d; verified in %.3f s", start.checkpoint, start.step, took)
    return start


def recovered_record(start: TrainingStart, incarnation: str) -> dict[str, Any]:
    """Return the step-log record that undoes the earlier records of steps after ``start``."""
    return {"kind": RECOVERED, "step": start.step, "incarnation": incarnation, "time": time.time()}


def evaluated(records: Iterable[StepRecord], eval_id: str, step: int) -> bool:
    """Return True if the step log has this evaluation of the weights of ``step``."""
    logged = ((record.get("eval_id"), record.get("step")) for record in records if record["kind"] == "eval")
    return (eval_id, step) in logged


def eval_id_of(step: int) -> str:
    """Return the name of the concurrent evaluation that is due after ``step``."""
    return f"{_EVAL_PREFIX}{step}"


def due_sets(sets: Mapping[str, EvaluationSet], step: int, total_steps: int) -> list[str]:
    """Return the data sets whose evaluation starts after ``step`` while training continues."""
    if not 0 < step < total_steps:
        return []
    return [name for name, made in sets.items() if made.every_steps and step % made.every_steps == 0]


def unanswered(
    records: Iterable[StepRecord],
    requested: Iterable[str],
    done: int,
    sets: Mapping[str, EvaluationSet],
    total_steps: int,
) -> list[tuple[str, int]]:
    """Return the concurrent evaluations up to step ``done`` without a result in the step log, with their steps.

    ``requested``: names of the evaluations that were requested from the manager. Those of ``done`` are
    always included: the trainer may have died before it asked. Weights of earlier steps are gone, so a
    repeated evaluation is done with the weights of ``done``; the step of a logged result is not compared.
    """
    logged = {record.get("eval_id") for record in records if record["kind"] == "eval"}
    names = (eval_id.partition(".")[0] for eval_id in requested if eval_id.startswith(_EVAL_PREFIX))
    numbers = (name.removeprefix(_EVAL_PREFIX) for name in names)
    steps = {done, *(int(number) for number in numbers if number.isdecimal())}
    due = ((id_of_set(eval_id_of(s), name), s) for s in sorted(steps) for name in due_sets(sets, s, total_steps))
    return [(eval_id, step) for eval_id, step in due if step <= done and eval_id not in logged]


def has_trained(records: Iterable[StepRecord]) -> bool:
    """Return True if the step log has a train step that was not undone."""
    return any(record["kind"] == "train" for record in records)


# ---- start of a trial
#
# The launcher decides it once and writes it to ``{trial}/start.json``; the MasterWorker reads it.
#
#     new        from the base model
#     resumed    from a checkpoint of another trial (resume=DIR), until this trial has one itself
#     recovered  from this trial's newest good checkpoint, or from the base model again if it has none yet
#
# A trainer that restarts during the run loads the newest checkpoint on the disk; without one, ``resumed_from``.


class SettingChange(msgspec.Struct, frozen=True):
    """A setting that differs from the last start of the trial. ``field`` is its dotted path."""

    field: str
    old: Any
    new: Any


class TrialStart(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher's decision. ``damaged``: why newer checkpoints cannot be used."""

    kind: Literal["new", "resumed", "recovered"]
    checkpoint: str = ""  # folder of the training state to load; empty: the base model
    step: int = -1  # steps in that state; -1: none
    trained: int = 0  # steps that earlier runs of this trial have trained
    changed: list[SettingChange] = []
    damaged: list[str] = []

    @property
    def resumed_from(self) -> str:
        """Checkpoint of another trial to begin from while this trial has none; may be empty."""
        return self.checkpoint if self.kind == "resumed" else ""


def write_start(start: TrialStart, path: Path) -> None:
    """Write the decision, atomically and durably. Raises OSError."""
    staged = path.with_name(f"{path.name}.tmp")
    with staged.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(start)))
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)


def read_start(path: Path) -> TrialStart:
    """Read the decision back. Raises ConfigError if the file cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=TrialStart)
    except OSError as error:
        problem = error.strerror or "cannot be read"
    except MALFORMED as error:
        problem = f"cannot be read: {error}"
    raise ConfigError("start.json", str(path), f"{problem}; run the same `realsys run` command again to write it")
