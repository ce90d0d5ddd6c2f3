"""`realsys sweep` with two real trials, read from Python."""

import subprocess

import pytest

import realsys
from realsys.launch.cli import main
from realsys.launch.words import own_words
from tests.support.jobs.jobs import BOUND_S, SMALL

pytestmark = pytest.mark.system

TINY = [
    *(text for text in SMALL if not text.startswith(("warmup.", "evaluation.", "data.arith."))),
    *("data.arith.train_size=20", "data.arith.eval_size=5", "data.arith.demo_size=0", "warmup.steps=0"),
    *("evaluation.problems=0", "rollout.workers=1", "telemetry.trackers=[]"),
    *("train.batch_groups=2", "rollout.group_size=2", "train.total_steps=1"),
]


def test_trials_are_run_once_and_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["sweep", *TINY, "train.optimizer.lr=1e-4,1e-3", "--trial", "s", "--plain"]
    done = subprocess.run([*own_words(), *words], capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 0 < done.stdout.index("arith/s-lr_1e-4: done") < done.stdout.index("arith/s-lr_1e-3: done")
    table = done.stdout.partition("A  arith/s-lr_1e-4")[2]
    assert "train.optimizer.lr  0.0001  0.001" in table

    assert main(words) == 0
    again = capsys.readouterr().out
    assert again.count("complete already") == 2 and "trial 1 of 2" not in again and again.endswith(table)

    trial = realsys.Trial("arith/s-lr_1e-3")
    assert trial.config.train.optimizer.lr == 1e-3 and trial.model is not None
    [record] = trial.steps()
    assert len(trial.samples(record["step"])) == record["sequences"] == 4
