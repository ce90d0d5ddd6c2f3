"""Whole jobs of the training side: several models on shared and separate workers, published algorithms, checkpoints."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from realsys.config.schema import TinyModelConfig
from realsys.data.char_model import make_tiny_model, write_char_tokenizer
from tests.support.jobs.checkpoints import load_checkpoint, weights_differ
from tests.support.jobs.jobs import Job, arith, run, run_arith
from tests.support.jobs.ledgers import check_ledger, check_staleness

pytestmark = pytest.mark.system

QUICK = ["evaluation.problems=0", "train.total_steps=3", "rollout.workers=1", "warmup.steps=10"]
# Sums so short that a fresh model is right now and then.
SIMPLE = ["data.arith.max_operands=2", "data.arith.max_operand=3", "warmup.steps=30"]
# Decoupled PPO with GAE; the KL to the reference is in the reward, so all three models feed the advantages.
CRITIC = ["algorithm=decoupled_ppo_critic", "train.ppo.kl.coef=0.05", "train.ppo.kl.place=reward"]
CRITIC += ["train.ppo.kl.adaptive=true", "evaluation.problems=0", "rollout.workers=1", "warmup.steps=60"]
DOCS = Path(__file__).resolve().parents[2] / "docs"


def finite(job: Job, *names: str) -> None:
    """These statistics are in every step, and are numbers."""
    for step in job.records("train"):
        for name in names:
            assert math.isfinite(step["stats"][name]), (name, step["stats"])


def make_reward_model(path: Path) -> Path:
    """A random scorer with the tokenizer and the sizes of the tiny model."""
    tiny = TinyModelConfig()
    write_char_tokenizer(path)
    make_tiny_model(tiny, path, seed=1)
    config = Qwen2Config.from_pretrained(path, num_labels=1, pad_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        Qwen2ForSequenceClassification(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def critic_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Three models on workers of their own, and a checkpoint of step 2."""
    return run_arith(
        tmp_path_factory.mktemp("runs"),
        "critic",
        *CRITIC,
        "allocation=sglang.d1+actor.d1,ref.d1+critic.m2",
        "roles.ref.offload=all",
        "checkpoint.every_steps=2",
        "train.total_steps=3",
    ).completed()


def test_critic_and_reference_train_on_workers_of_their_own(critic_job: Job) -> None:
    finite(critic_job, "loss", "advantages/return_mean", "critic_train/loss", "critic_train/grad_norm")
    first = critic_job.records("train")[0]["stats"]
    assert first["advantages/kl_ref_mean"] == pytest.approx(0, abs=1e-6), "the reference is the warmed-up actor"
    check_ledger(critic_job, batch_groups=8, eta=4, prompts=400)
    check_staleness(critic_job, 4)


def test_a_reward_model_scores_and_offloads_beside_the_actor(tmp_path: Path) -> None:
    scorer = make_reward_model(tmp_path / "scorer")
    job = run_arith(
        tmp_path,
        "reward",
        "algorithm=rloo",
        "train.ppo.advantage.mean=group",
        "train.ppo.reward_model.enabled=true",
        "train.ppo.reward_model.weight=0.5",
        f"roles.reward.path={scorer}",
        "roles.reward.offload=all",
        "train.offload=optimizer",
        *QUICK,
    ).completed()
    finite(job, "loss", "grad_norm")
    assert all(step["stats"]["grad_norm"] > 0 for step in job.records("train"))


def test_dynamic_sampling_replaces_groups_and_every_ticket_ends(tmp_path: Path) -> None:
    """DAPO: groups without a right answer, or without a wrong one, are dropped."""
    job = run_arith(tmp_path, "dapo", "algorithm=dapo", *SIMPLE, "train.ppo.overlong.buffer=16", *QUICK[:3]).completed()
    dropped = sum(step["dropped_filtered"] for step in job.records("train"))
    ledger = check_ledger(job, batch_groups=8, eta=4, prompts=400)
    assert dropped > 0
    assert ledger.counts.dropped_by_reason["success_rate"] >= dropped


def test_adapters_are_trained_and_served_merged(tmp_path: Path) -> None:
    """Only adapters learn; what is exported is a plain model that differs from the base in the targeted weights."""
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
    finite(job, "loss", "grad_norm")
    changed = weights_differ(load_checkpoint(job.paths.model, "a1b2="), load_checkpoint(job.paths.final_model, "a1b2="))
    assert changed and all(re.search(r"(q|k|v|down)_proj\.weight", name) for name in changed), changed
    load_checkpoint(job.root / "hf" / "step-2", "a1b2=")


def test_a_run_goes_on_from_a_checkpoint_in_another_layout(critic_job: Job, tmp_path: Path) -> None:
    """Steps, versions, schedule and prompts go on where the checkpoint is; admission is right from the first second.

    So do the critic, and the reference, which is the first trial's actor after its warm-up.
    """
    second = run_arith(
        tmp_path,
        "second",
        f"resume={critic_job.root / 'checkpoints' / 'step-00000002'}",
        *CRITIC,
        "allocation=sglang.d1+actor.p2,critic.p2",
        "train.total_steps=5",
        "checkpoint.at_end=true",
    ).completed()
    finite(second, "loss", "critic_train/loss")
    kl = second.records("train")[0]["stats"]["advantages/kl_ref_mean"]
    assert 0 < kl < 0.2, "against the model before the warm-up it would be above 1"
    assert [step["step"] for step in second.records("train")] == [3, 4, 5]
    assert not second.records("warmup")
    check_staleness(second, 4)
    assert (second.root / "checkpoints" / "step-00000005").is_dir()


def test_what_is_no_checkpoint_is_refused_before_anything_starts(tmp_path: Path) -> None:
    job = run(*arith(tmp_path, "none", f"resume={tmp_path}", *QUICK))
    assert job.returncode == 2
    assert "resume" in job.stderr and job.stderr.count("\n") == 1
    assert not job.root.exists()


def test_examples_of_algorithm_and_loss_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        f"roles.custom.teacher.path={tmp_path / 'teacher'}",
        "allocation=sglang.d1+actor.d1+teacher.d1",
        *QUICK,
    ).completed()
    finite(job, "loss", "grad_norm", "advantages/advantage_mean")
