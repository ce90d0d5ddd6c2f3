"""Runs of the command with a MasterWorker that is a script."""

import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

import realsys.launch.conclude
import realsys.launch.run
from realsys.config.paths import TrialPaths
from realsys.launch.cli import main
from realsys.launch.process_plan import ProcessSpec
from realsys.manager.ledger.events import Trained
from realsys.manager.ledger.journal import Journal
from realsys.manager.messages import DataPosition
from realsys.model_files.config_json import read_sizes
from realsys.train.checkpoint.checkpoint_files import CheckpointState, RoleState
from realsys.train.master.checkpoints import commit

SMALL = ["train_size=20", "eval_size=5", "demo_size=0"]
BASE = ["experiment=arith", *(f"data.arith.{field}" for field in SMALL), "evaluation.problems=5", "warmup.steps=0"]
RUN = [*BASE, "train.batch_groups=4", "train.total_steps=3"]
MASTER = """
import json, os, signal, time
with open({path!r}, "a") as log:
    for record in {records!r}:
        log.write(json.dumps({{**record, "time": time.time()}}) + "\\n")
{end}
"""
DONE = [{"kind": "phase", "phase": "train"}, *({"kind": "train", "step": n, "total": 3} for n in (1, 2, 3))]
DONE.append({"kind": "phase", "phase": "done"})
STOPPED = DONE[:3]
CTRL_C = f"os.kill(os.getppid(), {int(signal.SIGINT)}); signal.pause()"


class Runs:
    """Runs the command, with a MasterWorker that writes these records and ends like this."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths = TrialPaths(root / "runs" / "arith" / "t")
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(
            realsys.launch.conclude, "draw_curves", lambda *_: None
        )  # half of a run's time; test_run.py looks

    def __call__(
        self,
        *overrides: str,
        records: list[dict[str, object]] = DONE,
        end: str = "",
        trial: str = "t",
        argv: Sequence[str] = (),
    ) -> int:
        """``argv``: another command than ``run``."""

        def scripts(*_: object) -> list[ProcessSpec]:
            body = MASTER.format(path=str(self.paths.steps), records=records, end=end)
            argv = (sys.executable, "-c", body)
            log = self.paths.logs / "master_worker-0.log"
            return [ProcessSpec("master_worker", 0, argv, log, "end", env={"OMP_NUM_THREADS": "1"})]

        self._monkeypatch.setattr(realsys.launch.run, "plan", scripts)
        named = ["--trial", trial] if trial else []
        return main([*argv, *overrides] if argv else ["run", *RUN, *named, *overrides])

    def contents(self) -> dict[str, tuple[int, bytes]]:
        """Every file with its time and content: what a refusal must not change."""
        files = [path for path in sorted(self.paths.root.rglob("*")) if path.is_file()]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    def checkpoint(self, step: int) -> Path:
        """A complete checkpoint of the model that the trial has, with one file of 10 bytes."""
        sizes = asdict(read_sizes(self.paths.start_model, "lm")) | {"lora_rank": 0}
        roles = {"actor": RoleState(sizes, "adam", "d1p1m1")}
        state = CheckpointState(step, step, 1, 4, DataPosition(step * 4, [], 20, 1), roles, {}, "", 0.0)
        with Journal(self.paths.ledger) as journal:
            journal.append([Trained(step, step, [], 0.0)])
        tmp = self.paths.checkpoints / f"step-{step:08d}.tmp"
        tmp.mkdir(parents=True)
        return commit(tmp, state, [])
