"""`realsys logs`: of trials on this machine and of SLURM jobs, which wait, are queued again, and end."""

from collections.abc import Callable, Iterator

import pytest

from realsys.config.paths import TrialPaths
from realsys.launch.cli import main
from realsys.launch.commands import logs
from realsys.launch.slurm import submit
from realsys.launch.slurm.client import JobState
from realsys.launch.slurm.trial_job import TrialJob, job_log

Event = tuple[JobState | None, Callable[[], object]]


@pytest.fixture
def paths(tmp_path):
    """A trial on this machine with two logs."""
    paths = TrialPaths(tmp_path / "math" / "a")
    paths.logs.mkdir(parents=True)
    (paths.logs / "model_worker-0.log").write_text("one\ntwo\nthree\n")
    paths.config.write_text("{}")
    (paths.logs / "srun.log").write_text("")
    paths.summary.write_text("{}")  # an earlier run has written it
    return paths


def shown(paths, *words):
    return main(["logs", *words, "--trial-dir", str(paths.root)])


def append(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def script_job(monkeypatch, paths, events):
    """Make the trial job 7, which goes through these states; each does something first."""
    paths.job.parent.mkdir(parents=True)
    TrialJob.write(paths, "7")
    left: Iterator[Event] = iter(events)

    def next_state(job):
        state, act = next(left)
        act()
        return state

    monkeypatch.setattr(submit, "job_state", next_state)
    monkeypatch.setattr(submit, "_LOOK_S", 0.0)
    monkeypatch.setattr(logs, "is_here", lambda: True)


def test_trial_as_first_word_lists_its_logs(paths, capsys):
    assert main(["logs", str(paths.root)]) == 0
    assert "model_worker/0" in capsys.readouterr().out


def nothing():
    pass


def test_logs_are_listed_with_their_sizes(paths, capsys):
    assert shown(paths) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["model_worker/0", "14"], ["srun", "0"]]


def test_last_lines_of_a_process_are_shown(paths, capsys):
    assert shown(paths, "model_worker/0", "-n", "2") == 0
    assert capsys.readouterr().out == "two\nthree\n"


@pytest.mark.parametrize("words", [("model_worker/1",), ("model_walker/0", "-f"), ("job", "-f"), ("../a/0", "-f")])
def test_unknown_process_names_the_logs(paths, words, capsys):
    assert shown(paths, *words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"PROCESS='{words[0]}'" in line and "one of model_worker/0, srun" in line


def test_local_run_is_followed_to_its_end(paths, monkeypatch, capsys):
    """The summary of an earlier run does not end it."""
    log = paths.logs / "model_worker-0.log"
    lives = iter([True, True, False])

    def is_held(lock):
        append(log, "more\n")
        return next(lives)

    monkeypatch.setattr(logs, "is_held", is_held)
    monkeypatch.setattr(logs, "_LOOK_S", 0.0)
    assert shown(paths, "model_worker/0", "-f", "-n", "1") == 0
    assert capsys.readouterr().out == "three\nmore\nmore\nmore\n"


def test_job_is_followed_through_a_requeue(paths, monkeypatch, capsys):
    log = job_log(paths, "7")
    events: list[Event] = [
        (JobState("PENDING", "Resources"), nothing),
        (JobState("RUNNING", host="a1"), lambda: append(log, "first life\n")),
        (JobState("COMPLETING"), nothing),
        (JobState("PENDING", "BeginTime"), nothing),
        (JobState("RUNNING", host="a2"), lambda: append(log, "second life\n")),
        (JobState("COMPLETED", exit_code=0), lambda: append(log, "done\n")),
    ]
    script_job(monkeypatch, paths, events)
    assert shown(paths, "job", "-f") == 0
    out, err = capsys.readouterr()
    assert out == "first life\nsecond life\ndone\n"
    assert err.splitlines() == [
        f"job has no log yet: waiting for {log}",
        "job 7 waits (pending: Resources)",
        "job 7 runs on a1",
        "job 7 waits again (pending: BeginTime)",
        "job 7 runs on a2",
        "job 7 has ended: completed, exit code 0",
    ]


def test_log_of_a_later_process_is_awaited(paths, monkeypatch, capsys):
    log = paths.logs / "agent-0.log"
    script_job(
        monkeypatch,
        paths,
        [(JobState("RUNNING"), nothing), (JobState("RUNNING"), lambda: append(log, "joined\n")), (None, nothing)],
    )
    assert shown(paths, "agent/0", "-f") == 0
    assert capsys.readouterr().out == "joined\n"


def test_log_that_never_came_is_unknown(paths, monkeypatch, capsys):
    script_job(monkeypatch, paths, [(JobState("COMPLETED", exit_code=0), nothing)])
    assert shown(paths, "rollout_worker/9", "-f") == 2
    assert "has no log of that name" in capsys.readouterr().err


def test_ctrl_c_ends_the_wait(paths, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    script_job(monkeypatch, paths, [(JobState("PENDING", "Priority"), nothing), (None, interrupt)])
    assert shown(paths, "job", "-f") == 130


def test_without_slurm_the_summary_ends_it(paths, monkeypatch, capsys):
    script_job(monkeypatch, paths, [])
    monkeypatch.setattr(logs, "is_here", lambda: False)
    assert shown(paths, "srun", "-f") == 0
    assert "the state of job 7 is not known here" in capsys.readouterr().err
