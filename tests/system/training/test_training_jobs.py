"""Whole jobs of the training side: several models on shared and separate workers, published algorithms, checkpoints."""

import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from realsys.config.schema import TinyModelConfig
from realsys.data.arith import make_tiny_model, write_char_tokenizer
from realsys.weights.disk.manifest import complete_versions, directory_name, load_manifest
from tests.support.jobs.checkpoints import load_checkpoint, weights_differ
from tests.support.jobs.jobs import arith, run, run_arith
from tests.support.jobs.ledgers import check_finite, check_ledger

pytestmark = pytest.mark.system

QUICK = ["evaluation.problems=0", "train.total_steps=3", "rollout.workers=1", "warmup.steps=10"]
# Sums so short that a fresh model is right now and then.
SIMPLE = ["data.arith.max_operands=2", "data.arith.max_operand=3", "warmup.steps=30"]
DOCS = Path(__file__).resolve().parents[3] / "docs"


def make_reward_model(path):
    """A random scorer with the tokenizer and the sizes of the tiny model."""
    tiny = TinyModelConfig()
    write_char_tokenizer(path)
    make_tiny_model(tiny, path, seed=1)
    config = Qwen2Config.from_pretrained(path, num_labels=1, pad_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        Qwen2ForSequenceClassification(config).save_pretrained(path)
    return path


def test_reward_model_scores_and_offloads(tmp_path):
    scorer = make_reward_model(tmp_path / "scorer")
    job = run_arith(
        tmp_path,
        "reward",
        "algorithm=rloo",
        "train.ppo.advantage.mean=group",
        "train.ppo.reward_model_weight=0.5",
        f"roles.reward.path={scorer}",
        "roles.reward.offload=all",
        "train.offload=optimizer",
        *QUICK,
    ).completed()
    check_finite(job, "loss", "grad_norm")
    assert all(step["stats"]["grad_norm"] > 0 for step in job.records("train"))


def test_dynamic_sampling_replaces_groups_and_every_ticket_ends(tmp_path):
    """DAPO: groups without a right answer, or without a wrong one, are dropped."""
    job = run_arith(tmp_path, "dapo", "algorithm=dapo", *SIMPLE, "train.ppo.overlong.buffer=16", *QUICK[:3]).completed()
    dropped = sum(step["dropped_filtered"] for step in job.records("train"))
    ledger = check_ledger(job, batch_groups=8, eta=4, prompts=400)
    assert dropped > 0
    assert ledger.counts.filtered()["success_rate"] >= dropped


def test_adapters_are_trained_and_served_merged(tmp_path):
    """Only adapters learn; the export is a plain model that differs from the base in the targeted weights."""
    job = run_arith(
        tmp_path,
        "lora",
        "algorithm=dr_grpo",
        "train.lora.rank=4",
        "train.lora.targets=[qkv,down]",
        "train.optimizer.lr=1e-2",
        "checkpoint.hf_every_steps=2",
        "warmup.steps=0",
        *QUICK[:3],
    ).completed()
    check_finite(job, "loss", "grad_norm")
    before = load_checkpoint(job.paths.start_model, "a1b2=")
    changed = weights_differ(before, load_checkpoint(job.paths.final_model, "a1b2="))
    assert changed and all(re.search(r"(q|k|v|down)_proj\.weight", name) for name in changed), changed
    load_checkpoint(job.root / "hf" / "step-2", "a1b2=")
    first, *later = [load_manifest(folder) for _, _, folder in complete_versions(job.paths.weights("actor"))]
    assert not first.needs and later
    for version in later:  # each has the adapters alone
        assert version.needs == [directory_name(first.version, first.incarnation)]
        adapted = {name for name, info in version.tensors.items() if info.pieces[-1].rank}
        assert adapted == {name for name in version.tensors if re.search(r"(q|k|v|down)_proj\.weight", name)}
        assert sum(file.size for file in version.files.values()) < sum(file.size for file in first.files.values()) / 4


def test_folder_without_a_checkpoint_is_refused_at_start(tmp_path):
    job = run(*arith(tmp_path, "none", f"resume={tmp_path}", *QUICK))
    assert job.returncode == 2
    assert "resume" in job.stderr and job.stderr.count("\n") == 1
    assert not job.root.exists()


def test_examples_of_algorithm_and_loss_run(tmp_path, monkeypatch):
    """docs/examples/distill.py adds a role, a call handler and an algorithm; loss.py a loss."""
    monkeypatch.setenv("PYTHONPATH", str(DOCS / "examples"))
    write_char_tokenizer(tmp_path / "teacher")
    make_tiny_model(TinyModelConfig(), tmp_path / "teacher", seed=7)
    job = run_arith(
        tmp_path,
        "distill",
        "train.ppo.algorithm=distill:distill",
        "train.ppo.loss=loss:spo",
        "train.ppo.loss_args.eps=0.3",
        "train.ppo.skip_zero_advantage=false",
        f"roles.teacher.path={tmp_path / 'teacher'}",
        "allocation=sglang.d1+actor.d1+teacher.d1",
        *QUICK,
    ).completed()
    check_finite(job, "loss", "grad_norm", "advantages/advantage_mean")
