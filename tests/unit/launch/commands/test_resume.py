"""`realsys resume`: the stored configuration, and the changes that are given."""

import pytest

from realsys.config.paths import TrialPaths, read_config
from tests.support.scripted_runs import CTRL_C, STOPPED, Runs

pytestmark = pytest.mark.processes


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Runs(tmp_path, monkeypatch)


def test_resume_keeps_all_settings_but_the_given_ones(run, capsys):
    """Settings that the first command gave are not repeated, and the folder may be elsewhere by now."""
    run("train.optimizer.lr=0.5", records=STOPPED, end=CTRL_C)
    moved = run.paths.root.parents[2] / "other" / "arith" / "t"
    moved.parent.mkdir(parents=True)
    run.paths.root.rename(moved)
    run.paths = TrialPaths(moved)
    capsys.readouterr()
    assert run(argv=["resume", "train.total_steps=4", str(moved), "train.optimizer.weight_decay=0.25"]) == 2
    assert run(argv=["resume", str(moved), "train.total_steps=4"]) == 0
    out = capsys.readouterr().out
    changed = [line.split()[1] for line in out.splitlines() if line.startswith("changed:")]
    assert changed == [f"fileroot={str(moved.parents[1])!r}", "train.total_steps=4"]
    assert read_config(moved / "config.json").train.optimizer.lr == 0.5


def test_resume_takes_the_newest_trial(run, capsys):
    run(records=STOPPED, end=CTRL_C)
    capsys.readouterr()
    assert run(argv=["resume", "--dry-run"]) == 0
    assert "arith/t: " in capsys.readouterr().out
    assert run(argv=["resume", "trial=u"]) == 2
    assert "trial=''" in capsys.readouterr().err
