"""One whole job with all five kinds of process, and the invariants of its files."""

import json

import pytest

from realsys.manager.ledger.events import EvalAnswered, EvalStarted
from realsys.manager.ledger.journal import read_journal
from realsys.observe.step_fields import CURVES
from realsys.observe.step_log import StepTail, read_steps
from realsys.observe.timeline.perfetto import write_trace
from realsys.observe.timeline.why import explain
from realsys.weights.disk import manifest
from realsys.weights.disk.stage import stage
from tests.support.jobs.checkpoints import load_checkpoint, weights_differ
from tests.support.jobs.jobs import processes_of
from tests.support.jobs.ledgers import check_ledger, check_staleness
from tests.support.run_logs import undocumented
from tests.support.timelines.made_up import broken_rules
from tests.system.conftest import STEPS

pytestmark = pytest.mark.system


def test_each_step_trains_one_batch_and_one_version(job):
    steps = job.records("train")
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    assert [s["version"] for s in steps] == list(range(1, STEPS + 1))
    assert {s["groups"] for s in steps} == {8}
    assert {s["sequences"] for s in steps} == {32}
    assert all(s["stats"]["grad_norm"] > 0 and abs(s["stats"]["loss"]) < 100 for s in steps)


def test_every_field_of_the_step_log_is_documented(job):
    assert undocumented(StepTail(job.paths.steps).records()) == set()


def test_default_trackers_have_every_step(job):
    lines = [json.loads(line) for line in job.paths.metrics.read_text().splitlines()]
    points = [(line["kind"], line["step"]) for line in lines]
    assert points == [(r["kind"], r["step"]) for r in read_steps(job.paths.steps) if r["kind"] in CURVES]
    assert all(line["train/memory/rank_bytes"] > 1e7 for line in lines if line["kind"] == "train")
    assert {path.name for path in job.paths.tensorboard.iterdir()} == {"train", "eval", "warmup"}


def test_nothing_is_trained_beyond_the_staleness_bound(job):
    check_staleness(job, eta=4)


def test_each_ticket_is_trained_once_within_the_bound(job):
    ledger = check_ledger(job, batch_groups=8, eta=4, prompts=400)
    # All were within the bound, and none was rolled out that no step was left for: every ticket has ended.
    assert ledger.counts.granted == ledger.counts.attempts == ledger.counts.trained == STEPS * 8
    assert not ledger.open


def test_ledger_shows_each_evaluation_problem_answered_once(job):
    started, answered = [], []
    for event, _ in read_journal(job.paths.ledger):
        if isinstance(event, EvalStarted):
            started.append((event.eval_id, event.total))
        elif isinstance(event, EvalAnswered):
            answered.append((event.eval_id, event.prompt_index, event.failed))
    assert started == [("before-0", 16), (f"after-{STEPS}", 16)]
    assert sorted(answered) == sorted((name, index, False) for name, total in started for index in range(total))


def test_warm_up_learns_and_both_evaluations_are_there(job):
    losses = [r["loss"] for r in job.records("warmup")]
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert [(r["eval_id"], r["problems"]) for r in job.records("eval")] == [("before", 16), ("after", 16)]
    assert job.records("eval")[0]["version_max"] == 0
    assert job.records("eval")[1]["version_min"] == STEPS


def test_newest_weights_load_in_transformers(job):
    version, _, directory = manifest.complete_versions(job.paths.weights())[-1]
    assert version == STEPS
    stage(directory, STEPS)
    version, _, before = manifest.complete_versions(job.paths.weights())[-2]
    assert version == STEPS - 1
    files = [path.name for path in directory.glob("*.safetensors")]
    assert files and all((directory / name).read_bytes() != (before / name).read_bytes() for name in files)
    trained, fresh = (load_checkpoint(path, "a3b5=") for path in (job.paths.final_model, job.paths.start_model))
    assert weights_differ(trained, fresh)


def test_summary_and_curves_describe_the_run(job):
    summary = json.loads(job.paths.summary.read_text())
    assert summary["status"] == "done"
    assert summary["accuracy"]["before"] is not None and summary["accuracy"]["after"] is not None
    assert summary["restarts"] == [] and summary["killed_at_stop"] == []
    assert summary["model"] == str(job.paths.final_model)
    assert job.paths.curves.read_bytes().startswith(b"\x89PNG")
    assert "http://127.0.0.1:" in job.stdout  # the address of the status page
    assert "arith/whole: done" in job.stdout
    assert job.stderr == ""


def test_nothing_is_left_behind(job):
    assert processes_of(job.root) == []
    assert not list((job.root / "weights").rglob("*.tmp"))
    assert not list((job.root / "errors").glob("*"))


def test_timeline_follows_an_episode_through_all_processes(job, tmp_path):
    """Its arrow passes the manager, a RolloutWorker, a server, the ModelWorker that got it, and the master."""
    written = write_trace(job.paths, tmp_path / "trace.json")
    assert (written.lost, written.unread) == (0, 0)
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    assert broken_rules(events) == []
    names = {
        event["pid"]: event["args"]["name"].partition("/")[0] for event in events if event["name"] == "process_name"
    }
    ways = {}
    for event in events:
        if event["ph"] in "stf":
            ways.setdefault(event["name"], set()).add(names[event["pid"]])
    trained = [way for name, way in ways.items() if not name.startswith("eval-")]
    assert len(trained) == STEPS * 32
    kinds = {"gserver_manager", "rollout_worker", "generation_server", "model_worker", "master_worker"}
    assert all(way == kinds for way in trained)


def test_report_of_the_job_adds_up(job):
    report = explain(job.paths)
    assert [time.step for time, _ in report.steps] == list(range(1, STEPS + 1))
    assert report.covered == STEPS
    assert sum(report.waits.values()) == pytest.approx(report.time.parts["wait"])
    for (time, _), record in zip(report.steps, job.records("train"), strict=True):
        assert time.seconds - time.parts["between"] == pytest.approx(record["seconds"]["total"], rel=1e-6)
    assert report.waits.get("unknown", 0.0) < 0.05 * report.time.parts["wait"]
