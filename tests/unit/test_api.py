"""`realsys.run` and `realsys.Trial`, with a script in the place of `realsys run`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import realsys
from realsys import api
from realsys.errors import ConfigError, RealsysError, RecordError
from tests.support.view.shown_trial import STEPS, sample_trial

PAGE = Path(__file__).resolve().parents[2] / "docs" / "run.md"
ARITH = ["experiment=arith", "seed=3"]


def stand_in(monkeypatch, script):
    monkeypatch.setattr(api, "own_words", lambda: [sys.executable, "-c", f"import os, signal, sys\n{script}"])


@pytest.mark.processes
def test_import_is_cheap():
    """Every process imports the package."""
    script = "import sys, realsys; print([name for name in sys.modules if name.startswith('realsys')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['realsys']"


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="module 'realsys' has no attribute 'walk'"):
        realsys.walk  # noqa: B018


def test_trial_is_read_from_its_folder(tmp_path, monkeypatch):
    paths = sample_trial(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    trial = realsys.Trial("demo/shown")
    assert trial.folder == paths.root and repr(trial) == f"realsys.Trial('{paths.root}')"
    assert trial.config.trial == "shown" and trial.config.record.keep_steps
    assert [record["step"] for record in trial.steps()] == list(range(1, STEPS + 1))  # steps 21 to 23 once
    assert [record["phase"] for record in trial.steps("phase")][:1] == ["train"]
    assert trial.evaluations()[0]["eval_id"] == "before" and {r["kind"] for r in trial.evaluations()} == {"eval"}
    assert trial.model is None and trial.summary and trial.summary["status"] == "done"
    paths.final_model.mkdir()
    paths.summary.unlink()
    assert trial.model == paths.final_model and trial.summary is None
    with pytest.raises(ConfigError, match="kind='foo': must be one of train, eval, "):
        trial.steps("foo")


def test_samples_are_those_of_a_recorded_step(tmp_path):
    trial = realsys.Trial(sample_trial(tmp_path).root)
    samples = trial.samples()
    assert samples and {sample.step for sample in samples} == {STEPS} and samples == trial.samples(STEPS)
    assert samples[0].prompt and isinstance(samples[0].reward, float)
    with pytest.raises(RecordError, match="not recorded"):
        trial.samples(1)


def test_folder_that_is_no_trial_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not the folder of a trial"):
        realsys.Trial(tmp_path)


@pytest.mark.processes
def test_example_of_the_page_runs(tmp_path, monkeypatch, capsys):
    sample_trial(tmp_path)
    monkeypatch.chdir(tmp_path)
    script = "os.makedirs('runs/arith'); os.rename('demo/shown', 'runs/arith/' + sys.argv[-2]); print(sys.argv[1:])"
    stand_in(monkeypatch, script)
    [example] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    exec(compile(example, str(PAGE), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("['run', 'experiment=arith', ") and lines[0].endswith("'--trial', 'mine', '--plain']")
    assert len(lines) > 3


@pytest.mark.processes
def test_run_passes_words_on(tmp_path, monkeypatch, capsys):
    """The name of the trial is chosen before, so that its folder is known."""
    monkeypatch.chdir(tmp_path)
    body = "name = sys.argv[sys.argv.index('--trial') + 1]; os.makedirs('runs/arith/' + name)\n"
    body += "open(f'runs/arith/{name}/lock', 'w'); open('words', 'w').write(' '.join(sys.argv[1:])); print('line')"
    stand_in(monkeypatch, body)
    trial = realsys.run([*ARITH, "recover=auto"], quiet=True)
    assert re.fullmatch(r"\d{8}-\d{6}", trial.folder.name) and capsys.readouterr().out == ""
    words = f"run {' '.join(ARITH)} --trial {trial.folder.name} --plain recover=auto"
    assert (tmp_path / "words").read_text() == words


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "message", "code"),
    [
        ("print('noise', file=sys.stderr); sys.exit('realsys: config: seed=3: is bad')", "config: seed=3: is bad", 1),
        ("sys.exit('realsys: the run failed: x\\n  | realsys: y')", "the run failed: x\n  | realsys: y", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", "the run ended with exit code -9", -9),
    ],
)
def test_failure_has_message_and_exit_code(tmp_path, monkeypatch, script, message, code):
    monkeypatch.chdir(tmp_path)
    stand_in(monkeypatch, script)
    with pytest.raises(RealsysError) as caught:
        realsys.run(ARITH, quiet=True)
    assert str(caught.value).startswith(message) and caught.value.exit_code == code


@pytest.mark.processes
def test_run_that_is_refused_has_its_message(tmp_path, monkeypatch):
    """The real command finds it: the settings compose."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RealsysError, match="^config: allocation='serve.d1': ") as caught:
        realsys.run([*ARITH, "allocation=serve.d1"])
    assert caught.value.exit_code == 2 and not list(tmp_path.iterdir())


def test_setting_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="unknown field"):
        realsys.run([*ARITH, "train.x=3"])
    with pytest.raises(ConfigError, match="must be 1 to 64 letters"):
        realsys.run(ARITH, trial="a b")
    with pytest.raises(ConfigError, match="must be a list of texts"):
        realsys.run("experiment=arith")
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
def test_interrupt_stops_the_run_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ending = "def stopped(*_):\n    print('saved')\n    print('to continue: x', file=sys.stderr)\n    sys.exit(130)\n"
    stand_in(monkeypatch, f"{ending}signal.signal(2, stopped); os.kill(os.getppid(), 2); signal.pause()")
    with pytest.raises(KeyboardInterrupt):
        realsys.run(ARITH)
    assert "to continue: x" in capsys.readouterr().out
