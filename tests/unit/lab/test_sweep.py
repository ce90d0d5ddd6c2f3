"""`realsys sweep` with a script in the place of `realsys run`: checks, order, failures, Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from realsys.config.compose import compose
from realsys.lab import sweep
from realsys.launch import prepare
from realsys.launch.cli import main
from realsys.launch.start import StoredTrial
from tests.support.scripted_runs import BASE

#: Stand-in for `realsys run`. ``{end}``: its end in trials with ``seed=2``.
RUN = """
import json, os, pathlib, signal, sys
name = sys.argv[sys.argv.index("--trial") + 1]
with open("started", "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
root = pathlib.Path("runs", "arith", name)
root.mkdir(parents=True)
(root / "config.json").write_text(json.dumps({{"seed": name[-1]}}))
if "seed=2" in sys.argv:
    {end}
"""
CTRL_C = """
    def stopped(*_):
        open("stopped", "a").write("once")
        sys.exit(130)
    signal.signal(signal.SIGINT, stopped)
    os.kill(os.getppid(), signal.SIGINT)
    signal.pause()
"""


@dataclass(frozen=True)
class Sweep:
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def __call__(self, *words: str, end: str = "pass") -> int:
        script = RUN.format(end=end.strip())
        self.monkeypatch.setattr(sweep, "own_words", lambda: [sys.executable, "-c", script])
        return main(["sweep", *BASE, *words])

    @property
    def started(self) -> list[str]:
        log = self.folder / "started"
        return log.read_text().splitlines() if log.exists() else []

    @property
    def names(self) -> list[str]:
        return [line.partition("--trial ")[2].split()[0] for line in self.started]


@pytest.fixture
def run_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    monkeypatch.chdir(tmp_path)
    return Sweep(tmp_path, monkeypatch)


@pytest.mark.processes
def test_trials_run_in_order_and_are_compared(run_sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_sweep("seed=1,3", "--trial", "a", "--plain", "train.total_steps=7") == 0
    words = " ".join(BASE)
    assert run_sweep.started == [
        f"run {words} seed={seed} train.total_steps=7 --trial a-seed_{seed} --plain" for seed in (1, 3)
    ]
    out, err = capsys.readouterr()
    assert "trial 2 of 2: a-seed_3: seed=3" in out and err == ""
    assert "A  arith/a-seed_1" in out and "setting  A  B\nseed     1  3" in out


@pytest.mark.processes
def test_failed_trial_does_not_end_the_sweep(run_sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_sweep("seed=1,2,3", "trial=a", end="sys.exit(3)") == 3
    assert run_sweep.names == ["a-seed_1", "a-seed_2", "a-seed_3"]
    out, err = capsys.readouterr()
    first, again = err.splitlines()
    assert first == "realsys: 2 of 3 trials are complete; a-seed_2 ended with exit code 3"
    assert again.endswith("seed=1,2,3 --trial a") and " sweep experiment=arith " in again
    assert "C  arith/a-seed_3" in out


@pytest.mark.processes
def test_killed_trial_has_the_code_of_shells(run_sweep: Sweep) -> None:
    assert run_sweep("seed=2,3", "--trial", "a", end="os.kill(os.getpid(), signal.SIGKILL)") == 137
    assert run_sweep.names == ["a-seed_2", "a-seed_3"]


@pytest.mark.processes
def test_ctrl_c_stops_the_trial_and_the_sweep(run_sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    """The trial gets the signal once: a second one would kill it."""
    assert run_sweep("seed=1,2,3", "--trial", "a", end=CTRL_C) == 130
    assert run_sweep.names == ["a-seed_1", "a-seed_2"]
    assert (run_sweep.folder / "stopped").read_text() == "once"
    err = capsys.readouterr().err
    assert "1 of 3 trials are complete; a-seed_2 ended with exit code 130" in err and "to continue: " in err


def test_dry_run_lists_trials_and_starts_nothing(run_sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_sweep("seed=1,3", "--dry-run", "--trial", "a") == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["a-seed_1  seed=1  new", "a-seed_3  seed=3  new"]
    assert not list(run_sweep.folder.iterdir())


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["train.optimizer.lr=0.1,5"], "must be less than or equal to 1 (trial train.optimizer.lr=5)"),
        (["data.max_prompt_tokens=48,3"], "or set data.long_prompts=drop (trial data.max_prompt_tokens=3)"),
        (["seed=1,3", "--trial", "a" * 63], "'.', '_' or '-', and begin with a letter or digit (trial seed=1)"),
        (["generation=embedded,none"], "(trial generation=none)"),
        (["seed=1"], "no setting has a list of values"),
        (["trial=a,b"], "is the same for all trials"),
    ],
)
def test_first_error_ends_the_sweep_before_the_start(
    run_sweep: Sweep, capsys: pytest.CaptureFixture[str], words: Sequence[str], problem: str
) -> None:
    assert run_sweep(*words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("realsys: ") and problem in line
    assert not list(run_sweep.folder.iterdir())


def test_disk_must_hold_all_trials(
    run_sweep: Sweep, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "disk_bytes", lambda *_: 2**60)
    assert run_sweep("seed=1,3") == 2
    assert "(2 new trials together)" in capsys.readouterr().err


def with_earlier(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
    """Let the first trial be one that is done and has these settings."""
    found = compose([*BASE, "trial=a-lr_0.1", *overrides])
    done = StoredTrial(config=found, steps=found.train.total_steps, done=True, has_ledger=True, prompts=20)
    monkeypatch.setattr(prepare, "read_trial", lambda config, _: done if "0.1" in config.trial else StoredTrial())
    monkeypatch.setattr(prepare, "check_folder", lambda *_: None)


@pytest.mark.processes
def test_complete_trial_is_left_alone(
    run_sweep: Sweep, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_earlier(monkeypatch, "train.optimizer.lr=0.1", "train.ppo.eps_clip=0.3")
    assert run_sweep("train.optimizer.lr=0.1,0.2", "--trial", "a") == 0
    assert run_sweep.names == ["a-lr_0.2"]
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("a-lr_0.1"))
    assert "complete already; " in line and "it has train.ppo.eps_clip=0.3, not 0.2" in line


def test_trial_of_other_values_is_refused(
    run_sweep: Sweep, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers in names mean other values when the lists change."""
    with_earlier(monkeypatch, "train.optimizer.lr=0.3")
    assert run_sweep("train.optimizer.lr=0.1,0.2", "--trial", "a") == 2
    assert "trial 'a-lr_0.1' was begun with 0.3: choose another name with --trial" in capsys.readouterr().err
    assert run_sweep.started == []
