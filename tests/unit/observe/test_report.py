"""What is shown of a run and what it leaves: from the step log and the manager's status, whole or with holes."""

from __future__ import annotations

import io
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from realsys.config.paths import TrialPaths, write_config
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.commands import status
from realsys.launch.commands.options import find_trial
from realsys.launch.conclude import Summary, print_summary, summarise, write_summary
from realsys.launch.nodes.orders import ProcessId
from realsys.launch.supervise.failures import FirstFailure
from realsys.launch.supervise.restart_policy import Death, TrialOutcome
from realsys.observe.curves import draw_curves
from realsys.observe.screen.display import LiveView, make_view
from realsys.observe.screen.plain import PlainView, train_line
from realsys.observe.screen.progress import SHOWN_EVALS, WINDOW, TrialProgress
from tests.support.run_logs import START, run_records, train_record, write_log


def progress_of(records: list[dict[str, Any]]) -> TrialProgress:
    progress = TrialProgress()
    progress.add(records)
    return progress


def summary_of(
    paths: TrialPaths, records: list[dict[str, Any]], started: float = START, ended: float = START + 160
) -> Summary:
    write_log(paths, records)
    return summarise(Config(), paths, TrialOutcome("done", ""), started=started, ended=ended)


@pytest.fixture
def paths(tmp_path: Path) -> TrialPaths:
    return TrialPaths(tmp_path)


def drawn(progress: TrialProgress, paths: TrialPaths) -> str:
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=False)
    view = LiveView(console, Config(), paths)
    view.refresh(progress)
    console.print(view, end="")
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


INCOMPLETE = pytest.mark.parametrize(
    "records",
    [
        [],
        [{"kind": "train"}],
        [{"kind": "train", "step": 10**400, "total": None}],
        [{"kind": "warmup"}],
        [{"kind": "phase"}, {"kind": "eval"}, {"kind": "new"}],
    ],
)


@pytest.mark.parametrize("status", [{}, {"servers": {}}, {"servers": [None, {}]}, {"ledger": 3, "admission": []}])
@INCOMPLETE
def test_display_and_report_survive_missing_fields(
    records: list[dict[str, Any]], status: dict[str, Any], paths: TrialPaths
) -> None:
    progress = progress_of(records)
    progress.status = status
    assert "realsys" in drawn(progress, paths)
    PlainView(Console(file=io.StringIO())).refresh(progress, records)
    summary = summary_of(paths, records)
    write_summary(summary, paths)
    print_summary(Console(file=io.StringIO()), summary)
    assert json.loads(paths.summary.read_text())["accuracy"]["gain"] is None


@INCOMPLETE
def test_curves_survive_missing_fields(records: list[dict[str, Any]], paths: TrialPaths) -> None:
    write_log(paths, records)
    draw_curves(Config(), paths)
    assert paths.curves.is_file()


def test_plain_output_is_one_line_per_step() -> None:
    """The lines are in the order of the events."""
    out = io.StringIO()
    view = PlainView(Console(file=out, width=40))
    progress, records = TrialProgress(), run_records()
    for new in (records[:6], [], records[6:]):
        progress.add(new)
        view.refresh(progress, new)
    view.note("rollout_worker/0 exited with code 1; restart 1/5 in 0.5 s")
    lines = out.getvalue().splitlines()
    heads = " ".join(line.split()[0] for line in lines)
    assert heads == "phase warm-up phase evaluation phase step step step step phase evaluation phase !"
    assert lines[5].startswith("step 1/4  v1  reward +0.100  accuracy 50.0%  length 41  staleness 0.5/2  4,000 tok/s")


def test_step_line_names_shares_to_notice() -> None:
    signal, lost = {"equal": 0.25}, {"stale": 0.12, "zero_advantage": 0.2, "masked": 0.001}
    line = train_line(train_record(1, signal=signal, truncated_fraction=0.031, untrained=lost))
    assert line.endswith("7.0 s (waited 1.0)  no signal 25%  cut off 3%  stale 12%")
    assert train_line(train_record(1)).endswith("7.0 s (waited 1.0)")


def test_verdict_failures_are_shown_by_cause(paths: TrialPaths) -> None:
    """In the line of a step, in the live display and in the summary: no failure is silent."""
    first = train_record(1, verdict_failures={"raised": 1200, "elapsed": 1})
    assert train_line(first).endswith("(waited 1.0)  verdict failures 1 elapsed, 1,200 raised")
    assert train_line(train_record(1, verdict_failures={})).endswith("(waited 1.0)")
    assert "1 elapsed, 1,200 raised" in drawn(progress_of([first]), paths)
    summary = summary_of(paths, [first, train_record(2, verdict_failures={"raised": 2}), train_record(3)])
    assert summary["verdict_failures"] == {"raised": 1202, "elapsed": 1}
    out = io.StringIO()
    print_summary(Console(file=out, width=200), summary)
    assert "verdict failures      1 elapsed, 1,202 raised" in out.getvalue()


def test_rolled_back_steps_are_counted_once(paths: TrialPaths) -> None:
    records = run_records()
    steps = [record for record in records if record["kind"] == "train"]
    progress = progress_of(records)
    again = [{"kind": "recovered", "step": 2, "incarnation": "2", "time": START + 200}, *steps[2:]]
    view = PlainView(Console(file=(out := io.StringIO())))
    progress.add(again)
    view.refresh(progress, again)
    heads = [" ".join(line.split()[:2]) for line in out.getvalue().splitlines()]
    assert heads == ["training continues", "step 3/4", "step 4/4"]
    assert [record["step"] for record in progress.train] == [1, 2, 3, 4]
    summary = summary_of(paths, records + again)
    assert summary["steps"] == 4 and summary["recoveries"] == 1
    assert summary["staleness"]["histogram"] == {"0": 1200, "1": 800, "2": 48}
    print_summary(Console(file=(text := io.StringIO())), summary)
    assert "training continued from a checkpoint 1 time\n" in text.getvalue()


def test_display_memory_does_not_grow_with_run() -> None:
    progress = TrialProgress()
    progress.add({"kind": "warmup", "step": step, "total": 1000} for step in range(1, 1001))
    assert progress.step == (1000, 1000) and len(progress.warmup) == WINDOW
    progress.add(train_record(step, total=5000) for step in range(1, 5001))
    progress.add({"kind": "eval", "eval_id": f"step-{step}", "step": step} for step in range(0, 5001, 50))
    assert progress.step == (5000, 5000)
    assert [record["step"] for record in progress.train] == list(range(5001 - WINDOW, 5001))
    assert len(progress.evals) == SHOWN_EVALS and {"step-0", "step-5000"} <= progress.evals.keys()


@pytest.mark.parametrize(("back", "left", "shown"), [(4990, 4990, WINDOW - 10), (3, 3, 0), (0, 1000, 0), (-1, 0, 0)])
def test_steps_that_are_shown_after_a_recovery(back: int, left: int, shown: int) -> None:
    """Also one that goes back further than what is shown; to before the first step, where the warm-up counts."""
    progress = TrialProgress()
    progress.add({"kind": "warmup", "step": step, "total": 1000} for step in range(1, 1001))
    progress.add(train_record(step, total=5000) for step in range(1, 5001))
    progress.add([{"kind": "recovered", "step": back}])
    assert progress.step[0] == left and len(progress.train) == shown
    progress.add([train_record(back + 1, total=5000)])
    assert progress.step == (back + 1, 5000)


def test_times_of_earlier_starts_do_not_count(paths: TrialPaths) -> None:
    began = START + 1010
    records = [*run_records(), {"kind": "phase", "phase": "train", "time": began}]
    summary = summary_of(paths, records, started=START + 1000, ended=began + 5)
    assert summary["seconds"] == {"total": 15.0, "train": 5.0}
    assert summary["tokens"]["end_to_end_per_s"] is None and summary["tokens"]["trained_answer_tokens"] == 80000
    out = io.StringIO()
    print_summary(Console(file=out, width=200), summary)
    assert "0:15 since the last start, with 0 of the 4 steps  (train 0:05)" in out.getvalue()


def test_view_is_plain_where_there_is_no_terminal(paths: TrialPaths) -> None:
    assert isinstance(make_view(Console(file=io.StringIO()), Config(), paths, plain=False), PlainView)
    terminal = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(make_view(terminal, Config(), paths, plain=False), LiveView)
    assert isinstance(make_view(terminal, Config(), paths, plain=True), PlainView)


def test_summary_says_gain_times_and_tokens(paths: TrialPaths) -> None:
    paths.final_model.mkdir()
    outcome = TrialOutcome("done", "the MasterWorker finished")
    outcome.restarted = [Death("rollout_worker/0", ProcessId("host", 7), -9, START, Path("/x"))]
    write_log(paths, run_records())
    summary = summarise(Config(), paths, outcome, started=START - 5, ended=START + 160)
    assert summary["accuracy"]["before"] == 0.41 and summary["accuracy"]["gain"] == pytest.approx(0.425)
    assert summary["seconds"] == {"total": 165.0, "warmup": 60.0, "evaluate": 50.0, "train": 50.0}
    assert summary["tokens"]["trained_answer_tokens"] == 80000
    assert summary["tokens"]["end_to_end_per_s"] == pytest.approx(1600)
    assert summary["staleness"]["histogram"] == {"0": 1200, "1": 800, "2": 48}
    assert summary["staleness"]["dropped"] == 4 and summary["step_seconds"]["wait"] == 1.0
    assert summary["model"] == str(paths.final_model)
    out = io.StringIO()
    print_summary(Console(file=out, width=200), summary)
    assert "41.0% -> 83.5% (+42.5 points) on 512 problems" in out.getvalue()
    assert "rollout_worker/0 was killed by SIGKILL" in out.getvalue()
    assert "max 2, bound 4 when a group starts" in out.getvalue() and "since the last start" not in out.getvalue()


def test_shown_parts_of_a_step_add_up(paths: TrialPaths, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"wait": 0.333, "inf": 0.333, "train": 0.333, "total": 0.999}
    print_summary(Console(width=200), summary_of(paths, [train_record(1, seconds=seconds)]))
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step time")]
    total, parts = line.removeprefix("step time").split(" s = ")
    assert sum(round(100 * float(part.split()[1])) for part in parts.split(" + ")) == round(100 * float(total)) == 100


def test_accuracy_at_the_end_is_one_line(paths: TrialPaths) -> None:
    """43.95 % and 83.59 % differ by 39.64 points, but are shown as 43.9 % and 83.6 %."""
    before, after, other = (
        {"kind": "eval", "eval_id": name, "set": of_set, "step": 4, "complete": True, "problems": 512, "samples": 2}
        for name, of_set in (("before", "eval"), ("after", "eval"), ("after.sums", "sums"))
    )
    before["accuracy"], after["accuracy"], other["accuracy"] = 0.43945, 0.8359, 0.5
    after |= {"interval": [0.80, 0.864], "pass_at": {"1": {"value": 0.8359}, "2": {"value": 0.9}}}
    out = io.StringIO()
    print_summary(Console(file=out, width=200), summary_of(paths, [before, after, other]))
    held_out, of_sums = (line for line in out.getvalue().splitlines() if "problems" in line)
    assert of_sums == "evaluation after.sums  accuracy 50.0% (512 problems x 2)"
    assert held_out == ("held-out accuracy     43.9% -> 83.6% ± 3.2 (+39.7 points) on 512 problems x 2, pass@2 90.0%")


def test_groups_dropped_by_filter_are_counted_apart(paths: TrialPaths) -> None:
    summary = summary_of(paths, [train_record(1, dropped_filtered=5), train_record(2, dropped_filtered=2)])
    assert summary["staleness"]["filtered"] == 7
    out = io.StringIO()
    print_summary(Console(file=out, width=200), summary)
    assert "2 groups dropped as too old, 7 filtered out" in out.getvalue()


@pytest.mark.parametrize(
    ("train", "limit"),
    [
        ({"total_steps": 4}, "train.total_steps=4"),
        ({"total_steps": 9, "total_epochs": 2}, "train.total_epochs=2: the data gives 4 batches of 16"),
    ],
)
def test_reached_limit_of_run_is_named(paths: TrialPaths, train: dict[str, int], limit: str) -> None:
    write_log(paths, run_records())
    config = Config.model_validate({"train": {**train, "batch_groups": 16}})
    summary = summarise(config, paths, TrialOutcome("done", ""), started=START, ended=START + 160)
    assert summary["ended_by"] == limit
    print_summary(Console(file=(out := io.StringIO()), width=200), summary)
    assert any(line.split(None, 2) == ["ended", "by", limit] for line in out.getvalue().splitlines())


def test_end_of_the_prompts_is_named(paths: TrialPaths) -> None:
    """The time limit is not reached, although fewer steps were trained than planned."""
    used_up = {"kind": "used_up", "step": 3, "reason": "all 20 groups have ended"}
    write_log(paths, [train_record(1), train_record(2), used_up])
    config = Config.model_validate({"train": {"total_steps": 4, "total_epochs": 2, "max_seconds": 90}})
    summary = summarise(config, paths, TrialOutcome("done", ""), started=START, ended=START + 160)
    assert summary["ended_by"] == "train.total_epochs=2, after step 2 of 4: all 20 groups have ended"


def test_run_without_reached_limit_says_so(paths: TrialPaths) -> None:
    write_log(paths, [train_record(1), train_record(2)])
    config = Config.model_validate({"train": {"total_steps": 4, "max_seconds": 90}})
    done = summarise(config, paths, TrialOutcome("done", ""), started=START, ended=START + 160)
    assert done["ended_by"] == "train.max_seconds=90, before step 4"
    stopped = summarise(config, paths, TrialOutcome("interrupted", ""), started=START, ended=START + 160)
    assert stopped["ended_by"] is None
    paths.steps.unlink()
    assert summarise(config, paths, TrialOutcome("done", ""), started=START, ended=START + 160)["ended_by"] is None


def test_report_is_written_with_curves(paths: TrialPaths) -> None:
    summary = summary_of(paths, run_records())
    write_summary(summary, paths)
    draw_curves(Config(), paths)
    assert json.loads(paths.summary.read_text())["steps"] == 4
    assert paths.curves.read_bytes().startswith(b"\x89PNG")
    assert not list(paths.root.glob("*.tmp"))


def test_failed_run_has_a_summary_with_the_cause(paths: TrialPaths) -> None:
    failure = FirstFailure("model_worker/1", 12, START, "ModelError: no", Path("/x.log"), [])
    outcome = TrialOutcome("failed", "model_worker/0 exited with code 1")
    summary = summarise(Config(), paths, outcome, started=START, ended=START + 3, failure=failure)
    write_summary(summary, paths)
    assert summary["failure"] == {"process": "model_worker/1", "problem": "ModelError: no"}


def test_status_of_finished_and_unfinished_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="has no trial"):
        status.run(Namespace(trial_dir=None, json=False, watch=None))
    paths = TrialPaths(tmp_path / "runs" / "math" / "t")
    paths.root.mkdir(parents=True)
    write_config(Config(trial="t"), paths.config)
    write_log(paths, run_records()[:6])
    assert find_trial(None) == paths
    assert status.run(Namespace(trial_dir=None, json=False, watch=None)) == 0
    text = capsys.readouterr().out
    assert "killed, phase train" in text and "step 1/4" in text
    write_summary(summary_of(paths, run_records()), paths)
    assert status.run(Namespace(trial_dir=paths.root, json=False, watch=None)) == 0
    assert "83.5%" in capsys.readouterr().out


def test_summary_on_a_terminal_divides_no_word(paths: TrialPaths) -> None:
    """Into a file each fact is one line."""
    path = f"/shared/{'long-folder/' * 8}model"
    summary = summary_of(paths, run_records()) | {"model": path, "signal_warning": "no signal in many groups " * 8}
    narrow, file = (Console(file=io.StringIO(), width=80, force_terminal=tty) for tty in (True, False))
    for console in (narrow, file):
        print_summary(console, summary)
    shown, written = (console.file.getvalue().splitlines() for console in (narrow, file))  # type: ignore[attr-defined]
    assert max(len(line) for line in shown if "/" not in line) <= 80
    assert any(path in line for line in shown) and " ".join(" ".join(shown).split()).count("no signal in many") == 8
    assert len([line for line in written if line.startswith("weak signal")]) == 1
