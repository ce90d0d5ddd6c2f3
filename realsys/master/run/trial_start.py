"""Start of a trial: decided once by the launcher, written to ``{trial}/start.json``, read by the MasterWorker.

    new        from the base model
    resumed    from a checkpoint of another trial (resume=DIR), until this trial has one itself
    recovered  from this trial's newest good checkpoint, or from the base model again if it has none yet

A trainer that restarts during the run loads the newest checkpoint on the disk; without one, ``resumed_from``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from realsys.errors import MALFORMED, ConfigError


class Change(msgspec.Struct, frozen=True):
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
    changed: list[Change] = []
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
