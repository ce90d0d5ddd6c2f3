"""One whole job with all five kinds of process, and what must hold of what it leaves behind."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from realsys.config.paths import TrialPaths
from realsys.weights import manifest
from tests.system.jobs import Job, processes_of, run_job

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    finished = run_job(tmp_path_factory.mktemp("runs"), "whole")
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:] + finished.logs()
    return finished


def test_every_step_trains_one_batch_and_makes_one_version(job):
    steps = job.records("train")
    assert [s["step"] for s in steps] == [1, 2, 3, 4]
    assert [s["version"] for s in steps] == [1, 2, 3, 4]
    assert {s["groups"] for s in steps} == {8}
    assert {s["sequences"] for s in steps} == {32}
    assert all(s["stats"]["grad_norm"] >= 0 and abs(s["stats"]["loss"]) < 100 for s in steps)


def test_nothing_is_trained_beyond_the_staleness_bound(job):
    for step in job.records("train"):
        assert 0 <= step["staleness"]["min"] <= step["staleness"]["max"] <= 4
        assert sum(step["staleness"]["histogram"].values()) == step["sequences"]


def test_warm_up_learns_and_both_evaluations_are_there(job):
    losses = [r["loss"] for r in job.records("warmup")]
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert [(r["eval_id"], r["problems"]) for r in job.records("eval")] == [("before", 16), ("after", 16)]
    assert job.records("eval")[0]["version_max"] == 0
    assert job.records("eval")[1]["version_min"] == 4


def test_newest_weights_verify_and_the_checkpoint_loads_in_transformers(job):
    paths = TrialPaths(job.root)
    version, _, directory = manifest.complete_versions(paths.weights())[-1]
    assert version == 4
    manifest.verify(directory, 4)
    model = AutoModelForCausalLM.from_pretrained(paths.final_model)
    tokenizer = AutoTokenizer.from_pretrained(paths.final_model)
    ids = torch.tensor([tokenizer.encode("a3b5=", add_special_tokens=False)])
    assert torch.isfinite(model(ids).logits).all()


def test_ledger_shows_each_trained_ticket_once(job):
    from realsys.admission.journal import replay

    ledger = replay(TrialPaths(job.root).ledger)
    assert ledger is not None


def test_summary_and_curves_are_what_a_user_looks_at(job):
    summary = json.loads((job.root / "summary.json").read_text())
    assert summary["accuracy_after"] is not None
    assert (job.root / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "http://127.0.0.1:" in job.stdout  # the address of the status page


def test_nothing_is_left_behind(job):
    assert processes_of(job.root) == []
    assert not list((job.root / "weights").rglob("*.tmp"))
    assert not list((job.root / "errors").glob("*"))
