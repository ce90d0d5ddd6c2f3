"""Whole jobs with the examples of docs/examples, from a folder outside the checkout, against an installed package."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from realsys.config.compose import compose
from realsys.data.arith import make_tiny_model, write_char_tokenizer
from realsys.weights.disk import manifest
from realsys.weights.disk.stage import stage
from tests.support.jobs.job_models import make_qwen3
from tests.support.jobs.jobs import SMALL as SMALL_ARITH
from tests.support.jobs.jobs import arith, command, processes_of, running
from tests.support.jobs.ledgers import check_ledger, check_staleness
from tests.system.training.test_math_job import SMALL

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[3]
BUDGET, PROBLEMS = 40, 40


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A user's folder with the examples, next to realsys as pip installs it."""
    folder = tmp_path_factory.mktemp("user")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--target", str(folder / "installed")]
    subprocess.run([*pip, *options, str(source)], check=True, timeout=300)
    shutil.rmtree(source)
    shutil.copytree(ROOT / "docs" / "examples", folder / "mine")
    return folder


def run_outside(outside, root, argv):
    """Run a job in the user's folder: neither the checkout nor its tests are on the path."""
    env = {"PYTHONPATH": os.pathsep.join([str(outside / "installed"), str(outside / "mine")])}
    where = [sys.executable, "-c", "import realsys.launch; print(realsys.__file__, realsys.launch.__file__)"]
    found = subprocess.run(where, env={**os.environ, **env}, cwd=outside / "mine", capture_output=True, text=True)
    assert found.stdout.count(str(outside / "installed")) == 2, found.stdout + found.stderr
    with running(root, argv, env=env, cwd=outside / "mine") as live:
        live.wait()
    return live.job.completed()


def test_loss_agent_environment_and_transport_train_together(outside, tmp_path):
    copies = tmp_path / "copies"
    copies.mkdir()
    tests = [{"input": "", "output": "1"}]
    lines = [
        {"prompt": f"What is {k} + 3?", "answer": str(k + 3), "budget": BUDGET, "tests": tests} for k in range(PROBLEMS)
    ]
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = command(
        *SMALL,
        f"fileroot={tmp_path / 'runs'}",
        "trial=mine",
        f"model.path={make_qwen3(tmp_path / 'model')}",
        f"data.train={data}",
        "data.verifier=verifier:tests_passed",
        "rollout.agent=agent:ThinkThenAnswer",
        "rollout.agent_args.cue=' so '",
        "rollout.environment=environment:ShortAnswers",
        "train.ppo.loss=loss:spo",
        "train.ppo.loss_args.eps=0.3",
        "weights.transport=transport:Mirror",
        f"weights.transport_args.folder={copies}",
    )
    job = run_outside(outside, tmp_path / "runs" / "math" / "mine", argv)
    steps = job.records("train")
    assert [step["version"] for step in steps] == [1, 2]
    for step in steps:
        assert step["stats"]["grad_norm"] > 0
        # The agent counts its thought, the environment counts the unused budget of the row.
        assert 0 < step["metrics"]["thought_tokens"] <= 16 and 0 <= step["metrics"]["unused_budget"] <= 1
        assert step["length_max"] > step["metrics"]["thought_tokens"], "thought and answer are trained"
    assert set(job.records("eval")[-1]["metrics"]) == {"thought_tokens", "unused_budget"}
    versions = manifest.complete_versions(copies)
    assert versions[-1][0] == 2
    stage(versions[-1][2], 2)
    log = (job.paths.logs / "gserver_manager-0.log").read_text()
    assert f" published: {copies}/" in log
    assert (job.paths.final_model / "config.json").exists()
    assert processes_of(job.root) == []


def test_game_and_filter_train_together(outside, tmp_path):
    """Steps, their rewards at the turns, spare episodes that are cancelled, and groups that the filter refuses."""
    settings = [
        "rollout.agent=multi_turn",
        "rollout.agent_args={max_turns: 3, feedback_tokens: 24, turn_discount: 0.9}",
        "rollout.environment=guessing:Guessing",
        "rollout.oversample=1",
        "train.ppo.turn_rewards=true",
        "train.ppo.skip_zero_advantage=false",
        "train.ppo.filter.accept=filter:should_accept",
        "generation.sampling.max_new_tokens=32",
        "generation.embedded.context_length=0",
        # Sums so short that a fresh model ends its completions.
        "data.arith.max_operands=2",
        "data.arith.max_operand=3",
        "warmup.steps=40",
        "rollout.workers=1",
        "train.total_steps=2",
    ]
    job = run_outside(outside, *arith(tmp_path, "game", *settings))
    steps = job.records("train")
    assert [step["version"] for step in steps] == [1, 2]
    for step in steps:
        assert step["stats"]["grad_norm"] > 0 and 1 < step["metrics"]["turns"] <= 3
        assert -0.3 <= step["metrics"]["return"] <= 1.0
    ledger = check_ledger(job, batch_groups=8, eta=4, prompts=400)
    filtered = ledger.counts.filtered()
    assert filtered and filtered.keys() <= {"cut off", "similar rewards"}
    log = (job.paths.logs / "rollout_worker-0.log").read_text()
    assert "close failed" not in log and "rewards of single tokens" not in log
    assert processes_of(job.root) == []


def test_files_of_the_tutorial_train_together(tmp_path):
    """Rows, verifier, agent and loss in one job, with the settings of its file, on a model that knows nothing yet."""
    files = ROOT / "docs" / "examples" / "tutorial"
    rows = subprocess.run([sys.executable, files / "rows.py"], capture_output=True, text=True, check=True).stdout
    (tmp_path / "rows.jsonl").write_text("".join(rows.splitlines(keepends=True)[:60]))
    write_char_tokenizer(tmp_path / "model")
    make_tiny_model(compose(["experiment=arith"]).model.tiny, tmp_path / "model", seed=1)
    settings = [text for text in SMALL_ARITH if not text.startswith(("experiment=", "data.", "warmup."))]
    argv = command(
        *("--config-dir", str(files), "experiment=sums", *settings, f"fileroot={tmp_path}", "trial=mine"),
        *(f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'rows.jsonl'}"),
        *("rollout.agent=agent:run", "train.ppo.loss=loss:good_only", "train.ppo.loss_args.cap=1.1"),
        *("generation.embedded.context_length=0", "train.total_steps=2", "evaluation.problems=4"),
        "train.ppo.advantage.mean=batch",  # some completions are cut off: others are better than the mean
    )
    with running(tmp_path / "sums" / "mine", argv, env={"PYTHONPATH": str(files)}) as live:
        live.wait()
    steps = live.job.completed().records("train")
    assert [step["version"] for step in steps] == [1, 2]
    for step in steps:
        assert step["stats"]["grad_norm"] > 0
        assert 1 <= step["metrics"]["tries"] <= 2 and 0 <= step["metrics"]["right_sums"] <= 1


def test_backend_that_echoes_serves_a_whole_job(outside, tmp_path):
    settings = [
        "allocation=serve.d1+d1",
        "generation.backend=backend:Echo",
        "generation.backend_args.tokens=3",
        "warmup.steps=2",
        "train.total_steps=3",
    ]
    job = run_outside(outside, *arith(tmp_path, "echo", *settings))
    steps = job.records("train")
    assert [step["version"] for step in steps] == [1, 2, 3]
    assert all(np.isfinite(step["stats"]["loss"]) for step in steps)
    # The last evaluation was answered with the last version: the engine has taken every update.
    assert job.records("eval")[-1]["version_min"] == 3
    check_staleness(job, eta=4)
    check_ledger(job, batch_groups=8, eta=4, prompts=400)
    assert processes_of(job.root) == []


def test_loop_of_the_examples_is_a_program(outside, tmp_path):
    root = tmp_path / "runs" / "arith" / "loop"
    own = [f"fileroot={tmp_path / 'runs'}", "trial=loop", "warmup.steps=4", "evaluation.problems=0"]
    program = [sys.executable, "-P", str(outside / "mine" / "loops" / "best_of_n.py"), *SMALL_ARITH, *own]
    job = run_outside(outside, root, program)
    assert [step["version"] for step in job.records("train")] == [1, 2, 3, 4] or job.records("used_up")
