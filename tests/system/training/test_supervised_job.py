"""Whole supervised runs: on rows of ``data.demos``, without servers and with them, and as stages of a chain."""

import re

import pytest

from realsys.observe.step_log import read_steps
from tests.support.jobs.jobs import BOUND_S, SMALL, arith, processes_of, realsys, running

pytestmark = pytest.mark.system

ROWS = [
    "warmup.steps=0",
    "train.ppo.minibatches=2",
    "train.batch_groups=16",
    "train.total_steps=4",
    *("train.optimizer.lr=1e-3", "train.optimizer.warmup_fraction=0"),
    "evaluation.problems=0",
    "evaluation.every_steps=2",
    "checkpoint.every_steps=1",
]
PPO = """
experiment: arith
allocation: serve.d1+d1
evaluation: {problems: 8}
rollout: {workers: 1, group_size: 2, reward: {correct: 0.0, wrong: 0.0}}
train:
  ppo: {reward_model_weight: 1.0, advantage: {mean: none, std: none}}
"""


def weights(job):
    [file] = job.paths.final_model.glob("*.safetensors")
    return file.read_bytes()


@pytest.mark.parametrize("algorithm", ["dpo", "reward_model"])
def test_killed_run_ends_where_an_undisturbed_one_does(tmp_path, algorithm):
    """Bit by bit, also if its last step comes with a later start."""
    own = [*ROWS, f"algorithm={algorithm}", "allocation=d2" if algorithm == "dpo" else "allocation=d1"]
    with running(*arith(tmp_path, "whole", *own)) as live:
        whole = live.wait().completed()
    with running(*arith(tmp_path, "killed", *own, "train.total_steps=3")) as live:
        live.until_step(1)
        live.kill("model_worker/0")
        live.wait().completed()
    with running(*arith(tmp_path, "killed", *own)) as live:
        killed = live.wait().completed()
    assert weights(killed) == weights(whole)
    assert [step["step"] for step in killed.records("train")] == [1, 2, 3, 4]
    before, middle, after = whole.records("eval")
    assert (before["eval_id"], middle["eval_id"], after["eval_id"]) == ("before.demos", "step-2.demos", "after.demos")
    assert after["loss"] != before["loss"]
    assert 0 <= after["accuracy"] <= 1
    audit = realsys("audit", killed.root)
    assert audit.returncode == 0 and "every check holds" in audit.stdout, audit.stdout
    assert "held-out rows" in whole.stdout and len(list(whole.paths.root.glob("weights/actor/*"))) == 1


def test_run_with_servers_samples_its_evaluations_only(tmp_path):
    own = [*ROWS, "algorithm=sft", "allocation=serve.d1+d1", "evaluation.problems=8"]
    with running(*arith(tmp_path, "served", *own)) as live:
        job = live.wait().completed()
    evaluated = {record["eval_id"]: record["problems"] for record in job.records("eval")}
    assert evaluated["before"] == evaluated["after"] == 8 and "after.demos" in evaluated
    audit = realsys("audit", job.root)
    assert audit.returncode == 0 and re.search(r"^tickets +0 ", audit.stdout, re.MULTILINE), audit.stdout


def test_chain_ends_with_a_policy_that_a_trained_model_rewards(tmp_path):
    """Each stage starts from the models before it; the same command again finds all of them complete."""
    files = []
    for name, layout in (("sft", "d1p2"), ("reward_model", "d1")):
        files.append(tmp_path / f"{name}.yaml")
        stage = f"experiment: arith\nalgorithm: {name}\nallocation: {layout}\nevaluation: {{problems: 0}}\n"
        files[-1].write_text(stage)
    files.append(tmp_path / "ppo.yaml")
    files[-1].write_text(PPO)
    of_files = ("experiment=", "allocation=", "warmup.steps=", "evaluation.problems=", "train.ppo.", "rollout.")
    shared = [word for word in SMALL if not word.startswith(of_files)]
    words = ["chain", *files, *shared, "train.total_steps=2", f"fileroot={tmp_path / 'runs'}", "--trial=x", "--plain"]
    made = realsys(*words, timeout_s=2 * BOUND_S)
    assert made.returncode == 0, made.stdout + made.stderr
    root = tmp_path / "runs" / "arith"
    gains = re.findall(r"^stage (\d), .*: (held-out \S+ \S+ -> \S+)", made.stdout, re.MULTILINE)
    assert [number for number, _ in gains] == ["1", "2", "3"], made.stdout
    before, after = (record["loss"] for record in read_steps(root / "x-1" / "steps.jsonl") if record["kind"] == "eval")
    assert f"{before:.3f} -> {after:.3f}" in made.stdout and after < before
    logs = {file.stem.rpartition("-")[0] for file in (root / "x-1" / "logs").iterdir()}
    assert "model_worker" in logs and not logs & {"generation_server", "rollout_worker"}
    config = (root / "x-3" / "config.json").read_text()
    assert str(root / "x-1" / "model") in config and str(root / "x-2" / "model") in config
    again = realsys(*words)
    assert again.returncode == 0 and again.stdout.count("complete already") >= 3, again.stdout
    assert processes_of(root) == []
