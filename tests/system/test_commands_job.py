"""`realsys status`, `audit`, `samples` and `replay` on a trial that runs, has ended, is damaged, or is none."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from realsys.config.paths import TrialPaths
from realsys.launch.cli import main
from realsys.train.records.record_files import recorded_steps
from tests.support.jobs.jobs import arith, running

pytestmark = pytest.mark.system

COMMANDS = ("status", "audit", "samples", "replay")
QUICK = ["warmup.steps=2", "evaluation.problems=0", "train.batch_groups=4", "rollout.group_size=2", "rollout.workers=1"]
QUICK += ["checkpoint.every_steps=2", "train.total_steps=100000", "cluster.stop_timeout_s=60.0"]


@dataclass(frozen=True)
class LookedAt:
    root: Path
    step: int  # the last that was recorded
    while_it_ran: dict[str, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> LookedAt:
    """A run that was looked at, and then stopped."""
    root, argv = arith(tmp_path_factory.mktemp("runs"), "looked_at", *QUICK)
    with running(root, argv) as live:
        live.until(lambda: len(recorded_steps(TrialPaths(root).records)) >= 3, "three recorded steps", timeout_s=180)
        seen = {
            command: subprocess.run(
                [sys.executable, "-m", "realsys.launch.cli", command, str(root)],
                capture_output=True,
                text=True,
                timeout=120,
                stdin=subprocess.DEVNULL,
            )
            for command in ("status", "audit", "samples")
        }
        live.process.send_signal(signal.SIGINT)
        job = live.wait(180)
    assert job.returncode == 130, job.report()
    return LookedAt(root, max(recorded_steps(job.paths.records)), seen)


@pytest.mark.parametrize(
    ("command", "text"), [("status", "arith/looked_at: phase train"), ("audit", "no ticket"), ("samples", "[v")]
)
def test_a_trial_can_be_looked_at_while_it_runs(trial: LookedAt, command: str, text: str) -> None:
    done = trial.while_it_ran[command]
    assert (done.returncode, done.stderr) == (0, "") and text in done.stdout


# what is damaged -> command -> exit code and what is said; a command that is not named is not run
CONFIG = {"status": (2, "config.json"), "audit": (0, ""), "samples": (2, "config.json"), "replay": (2, "config.json")}
FINE = {"status": (0, ""), "audit": (0, ""), "samples": (0, "")}
DAMAGES: dict[tuple[str, str], dict[str, tuple[int, str]]] = {
    ("config.json", "truncated"): CONFIG,
    ("config.json", "garbage"): CONFIG,
    ("config.json", "missing"): CONFIG,
    ("ledger.jsonl", "truncated"): {**FINE, "audit": (1, "")},
    ("ledger.jsonl", "garbage"): {**FINE, "audit": (2, "is a record: restore it")},
    ("ledger.jsonl", "missing"): {**FINE, "audit": (2, "ledger.jsonl: No such file")},
    ("steps.jsonl", "truncated"): {**FINE, "audit": (1, "")},
    ("steps.jsonl", "garbage"): {**FINE, "audit": (1, "")},
    ("steps.jsonl", "missing"): FINE,
    ("summary.json", "truncated"): {**FINE, "status": (2, "summary.json")},
    ("summary.json", "garbage"): {**FINE, "status": (2, "summary.json")},
    ("summary.json", "missing"): FINE,
    ("record/*/batch.json", "truncated"): {**FINE, "samples": (2, "is damaged"), "replay": (2, "is damaged")},
    ("record/*/batch.json", "garbage"): {**FINE, "samples": (2, "is damaged"), "replay": (2, "is damaged")},
    ("record/*/batch.json", "missing"): {**FINE, "samples": (2, "not recorded"), "replay": (2, "not recorded")},
    ("record/*/worker-00000.safetensors", "truncated"): {"samples": (2, "is damaged"), "replay": (2, "is damaged")},
    ("record/*/worker-00000.safetensors", "garbage"): {"samples": (2, "is damaged"), "replay": (2, "is damaged")},
    ("record/*/worker-00000.safetensors", "missing"): {"samples": (2, "cannot be"), "replay": (2, "cannot be")},
    ("checkpoints/*/state.json", "truncated"): {**FINE, "replay": (2, "state.json is corrupt")},
    ("checkpoints/*/state.json", "garbage"): {**FINE, "replay": (2, "state.json is corrupt")},
    ("checkpoints/*/state.json", "missing"): {**FINE, "replay": (2, "there is: none at all")},
    ("checkpoints/*/*-of-00001.json", "garbage"): {**FINE, "replay": (2, "corrupt")},
    ("checkpoints/*/*-of-00001.json", "missing"): {**FINE, "replay": (2, "cannot be read")},
}


@pytest.mark.parametrize(("pattern", "damage"), DAMAGES)
def test_a_damaged_file_is_one_line_to_whom_it_concerns(
    pattern: str, damage: str, trial: LookedAt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "trial"
    shutil.copytree(trial.root, root)
    damaged = list(root.glob(pattern))
    assert damaged
    for path in damaged:
        content = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(content[: len(content) // 2] if damage == "truncated" else noise(len(content)))
    for command, (code, text) in DAMAGES[pattern, damage].items():
        which = ["--step", str(trial.step)] if command in ("samples", "replay") else []
        capsys.readouterr()
        assert main([command, str(root), *which]) == code, capsys.readouterr().err
        out, err = capsys.readouterr()
        if code == 2:
            assert out == "" and err.startswith("realsys: ") and err.count("\n") == 1 and text in err
        else:
            assert err == "" and ("FAILED" in out) == (code == 1)


def noise(size: int) -> bytes:
    return random.Random(7).randbytes(size)


NO_TRIAL = [(command, folder) for command in COMMANDS for folder in ("nowhere", "empty", "file", "file/below")]


@pytest.mark.parametrize(("command", "folder"), [*NO_TRIAL, ("status", "")])
def test_what_is_no_trial_is_one_line(
    command: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert main([command, *([folder] if folder else [])]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("realsys: config: ") and err.count("\n") == 1
    assert "trial" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


@pytest.mark.parametrize("content", ["{}", "[]", "3", '{"experiment": "a", "trial": "b"}'])
def test_a_summary_that_is_something_else_is_one_line(
    content: str, trial: LookedAt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(trial.root / "config.json", tmp_path)
    (tmp_path / "summary.json").write_text(content)
    assert main(["status", str(tmp_path)]) == 2
    assert "is no summary" in capsys.readouterr().err


@pytest.mark.parametrize("record", ['{"kind":"train"}', '{"kind":"train","step":"x","tickets":3}', '{"kind":"eval"}'])
def test_records_of_the_step_log_with_holes_stop_nobody(
    record: str, trial: LookedAt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "ledger.jsonl", "steps.jsonl"):
        shutil.copy(trial.root / name, tmp_path)
    with (tmp_path / "steps.jsonl").open("a") as log:
        log.write(record + "\n")
    assert main(["status", str(tmp_path)]) == main(["audit", str(tmp_path)]) == 0
    assert "the run is starting, or was killed" in capsys.readouterr().out
