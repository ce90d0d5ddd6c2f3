"""What is shown of a run and what it leaves: from the step log and the manager's status, whole or with holes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from realsys.config.dump import write_config
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.commands.status import find_trial, show_status
from realsys.launch.nodes.base import ProcessId
from realsys.launch.processes.failures import FirstFailure
from realsys.launch.processes.restart_policy import Death, Outcome
from realsys.launch.screen.display import LiveView, PlainView, make_view, sparkline, train_line
from realsys.launch.screen.progress import SHOWN_EVALS, WINDOW, Progress
from realsys.launch.screen.report import Summary, draw_curves, print_summary, summarise, write_summary

START = 1_700_000_000.0


def train_record(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "total": 4,
        "version": step,
        "time": START + 100 + 10 * step,
        "seconds": {"wait": 1.0, "inf": 2.0, "train": 3.0, "save": 0.5, "publish": 0.25, "total": 7.0},
        "groups": 64,
        "sequences": 512,
        "tokens": 30000,
        "answer_tokens": 20000,
        "reward_mean": 0.1 * step,
        "accuracy": 0.4 + 0.1 * step,
        "length_mean": 40.0 + step,
        "length_correct": 38.0,
        "length_wrong": None,
        "truncated_fraction": 0.0,
        "staleness": {"min": 0, "mean": 0.5, "max": 2, "histogram": {"0": 300, "1": 200, "2": 12}},
        "dropped_stale": 1,
        "train_tokens_per_s": 9000.0,
        "consumed_tokens_per_s": 4000.0,
        "lr": 1e-4,
        "stats": {"loss": 0.1, "grad_norm": 0.5},
        **changes,
    }


def run_records() -> list[dict[str, Any]]:
    def phase(name: str, at: float) -> dict[str, Any]:
        return {"kind": "phase", "phase": name, "time": START + at}

    def held_out(name: str, step: int, accuracy: float, at: float) -> dict[str, Any]:
        record = {"kind": "eval", "eval_id": name, "step": step, "problems": 512, "accuracy": accuracy}
        return {**record, "length_mean": 40.0, "seconds": 5.0, "time": START + at}

    warmup = {"kind": "warmup", "step": 1, "total": 1, "loss": 2.0, "tokens": 3000, "seconds": 0.5, "lr": 1e-3}
    return [
        phase("warmup", 0),
        {**warmup, "time": START + 1},
        phase("evaluate", 60),
        held_out("before", 0, 0.41, 65),
        phase("train", 100),
        *(train_record(step) for step in range(1, 5)),
        phase("evaluate", 150),
        held_out("after", 4, 0.835, 155),
        phase("done", 160),
    ]


def progress_of(records: list[dict[str, Any]]) -> Progress:
    progress = Progress()
    progress.add(records)
    return progress


def write_log(paths: TrialPaths, records: list[dict[str, Any]]) -> None:
    paths.steps.write_text("".join(json.dumps(record) + "\n" for record in records))


def summary_of(
    paths: TrialPaths, records: list[dict[str, Any]], started: float = START, ended: float = START + 160
) -> Summary:
    write_log(paths, records)
    return summarise(Config(), paths, Outcome("done", ""), started=started, ended=ended)


STATUS = {
    "version": 4,
    "servers": [
        {"name": "generation_server/0", "state": "serving", "version": 4, "running": 12, "tokens_per_s": 8000.0},
        {"name": "generation_server/1", "state": "updating", "version": None, "running": 0, "url": "http://h:1"},
    ],
    "ledger": {"running": 12, "finished": 3, "trained": 256, "dropped": 4, "dropped_by_reason": {"masked": 4}},
    "throughput": {"generated_tokens_per_s": 7900.0},
    "admission": {"headroom": 0, "admits": False, "reason": "staleness"},
}


@pytest.fixture
def paths(tmp_path: Path) -> TrialPaths:
    return TrialPaths(tmp_path)


def drawn(progress: Progress, paths: TrialPaths) -> str:
    console = Console(file=io.StringIO(), width=140, force_terminal=False)
    view = LiveView(console, Config(), paths)
    view._progress = progress
    console.print(view.render())
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_live_display_shows_what_matters(paths: TrialPaths) -> None:
    progress = progress_of(run_records())
    progress.status, progress.address = STATUS, "http://127.0.0.1:4321"
    text = drawn(progress, paths)
    for shown in ("4/4", "80.0%", "9,000", "7,900", "2 max", "eta 4", "generation_server/1", "http://127.0.0.1:4321/"):
        assert shown in text, shown
    assert "7.00 s: wait 14%, inf 29%, train 43%" in text and "83.5 %" in text and "staleness" in text


def test_live_display_shows_tokens_that_were_not_trained(paths: TrialPaths) -> None:
    untrained = {"stale": 0.0625, "zero_advantage": 0.5}
    text = drawn(progress_of([train_record(1, untrained=untrained, too_old=0.0625)]), paths)
    assert "stale 6.2%, zero_advantage 50.0% of" in text


def test_live_display_hides_version_before_the_first(paths: TrialPaths) -> None:
    progress = progress_of([{"kind": "phase", "phase": "warmup", "time": START}])
    progress.status = {**STATUS, "version": -1, "admission": {"admits": False, "reason": "no_server"}}
    text = drawn(progress, paths)
    assert "version             -  " in text and "waits for a server with weights" in text


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
    draw_curves(summary_of(paths, records), paths)
    assert paths.curves.is_file()


def test_plain_output_is_one_line_per_step() -> None:
    """The lines are in the order of the events."""
    out = io.StringIO()
    view = PlainView(Console(file=out, width=40))
    progress, records = Progress(), run_records()
    for new in (records[:6], [], records[6:]):
        progress.add(new)
        view.refresh(progress, new)
    view.note("rollout_worker/0 exited with code 1; restart 1/5 in 0.5 s")
    lines = out.getvalue().splitlines()
    heads = " ".join(line.split()[0] for line in lines)
    assert heads == "phase warm-up phase evaluation phase step step step step phase evaluation phase !"
    assert lines[5].startswith("step 1/4  v1  reward +0.100  accuracy 50.0%  length 41  lag 0.5/2  4,000 tok/s")


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
    progress = Progress()
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
    progress = Progress()
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


def test_view_is_plain_where_there_is_no_terminal(paths: TrialPaths) -> None:
    assert isinstance(make_view(Console(file=io.StringIO()), Config(), paths, plain=False), PlainView)
    terminal = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(make_view(terminal, Config(), paths, plain=False), LiveView)
    assert isinstance(make_view(terminal, Config(), paths, plain=True), PlainView)


def test_summary_says_gain_times_and_tokens(paths: TrialPaths) -> None:
    paths.final_model.mkdir()
    outcome = Outcome("done", "the MasterWorker finished")
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
    assert "41.0% -> 83.5%  (+42.5 points) on 512 problems" in out.getvalue()
    assert "rollout_worker/0 was killed by SIGKILL" in out.getvalue()


def test_groups_dropped_by_filter_are_counted_apart(paths: TrialPaths) -> None:
    summary = summary_of(paths, [train_record(1, dropped_filtered=5), train_record(2, dropped_filtered=2)])
    assert summary["staleness"]["filtered"] == 7
    out = io.StringIO()
    print_summary(Console(file=out, width=200), summary)
    assert "2 groups dropped, 7 filtered out" in out.getvalue()


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
    summary = summarise(config, paths, Outcome("done", ""), started=START, ended=START + 160)
    assert summary["ended_by"] == limit
    print_summary(Console(file=(out := io.StringIO()), width=200), summary)
    assert any(line.split(None, 2) == ["ended", "by", limit] for line in out.getvalue().splitlines())


def test_end_of_the_prompts_is_named(paths: TrialPaths) -> None:
    """The time limit is not reached, although fewer steps were trained than planned."""
    used_up = {"kind": "used_up", "step": 3, "reason": "all 20 groups have ended"}
    write_log(paths, [train_record(1), train_record(2), used_up])
    config = Config.model_validate({"train": {"total_steps": 4, "total_epochs": 2, "max_seconds": 90}})
    summary = summarise(config, paths, Outcome("done", ""), started=START, ended=START + 160)
    assert summary["ended_by"] == "train.total_epochs=2, after step 2 of 4: all 20 groups have ended"


def test_run_without_reached_limit_says_so(paths: TrialPaths) -> None:
    write_log(paths, [train_record(1), train_record(2)])
    config = Config.model_validate({"train": {"total_steps": 4, "max_seconds": 90}})
    done = summarise(config, paths, Outcome("done", ""), started=START, ended=START + 160)
    assert done["ended_by"] == "train.max_seconds=90, before step 4"
    stopped = summarise(config, paths, Outcome("interrupted", ""), started=START, ended=START + 160)
    assert stopped["ended_by"] is None
    paths.steps.unlink()
    assert summarise(config, paths, Outcome("done", ""), started=START, ended=START + 160)["ended_by"] is None


def test_report_is_written_with_curves(paths: TrialPaths) -> None:
    summary = summary_of(paths, run_records())
    write_summary(summary, paths)
    draw_curves(summary, paths)
    assert json.loads(paths.summary.read_text())["steps"] == 4
    assert paths.curves.read_bytes().startswith(b"\x89PNG")
    assert not list(paths.root.glob("*.tmp"))


def test_failed_run_has_a_summary_with_the_cause(paths: TrialPaths) -> None:
    failure = FirstFailure("model_worker/1", 12, START, "ModelError: no", Path("/x.log"), [])
    outcome = Outcome("failed", "model_worker/0 exited with code 1")
    summary = summarise(Config(), paths, outcome, started=START, ended=START + 3, failure=failure)
    write_summary(summary, paths)
    assert summary["failure"] == {"process": "model_worker/1", "problem": "ModelError: no"}


def test_sparkline_is_bounded_and_flat_lines_are_low() -> None:
    assert sparkline([{"x": 1.0}], "x") == ""
    assert sparkline([{"x": 1.0}] * 3, "x") == "▁▁▁"
    line = sparkline([{"x": float(i)} for i in range(1000)], "x")
    assert len(line) == 24 and line[0] == "▁" and line[-1] == "█"


def test_status_of_finished_and_unfinished_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="has no trial"):
        show_status(None)
    paths = TrialPaths(tmp_path / "runs" / "math" / "t")
    paths.root.mkdir(parents=True)
    write_config(Config(trial="t"), paths.config)
    write_log(paths, run_records()[:6])
    assert find_trial(None) == paths
    assert show_status(None) == 0
    text = capsys.readouterr().out
    assert "phase train" in text and "step 1/4" in text and "no manager answers" in text
    write_summary(summary_of(paths, run_records()), paths)
    assert show_status(paths.root) == 0
    assert "83.5%" in capsys.readouterr().out
