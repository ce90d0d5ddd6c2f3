"""A whole job with a critic and a reference model, and one that resumes from its checkpoint."""

import pytest

from realsys.observe.step_log import StepTail
from tests.support.jobs.jobs import run_arith
from tests.support.jobs.ledgers import check_finite, check_ledger, check_staleness
from tests.support.run_logs import undocumented

pytestmark = pytest.mark.system

# Decoupled PPO with GAE; the KL to the reference is in the reward, so all three models feed the advantages.
CRITIC = ["algorithm=decoupled_ppo_critic", "train.ppo.kl.coef=0.05", "train.ppo.kl.place=reward"]
CRITIC += ["train.ppo.kl.target=0.1", "evaluation.problems=0", "rollout.workers=1", "warmup.steps=60"]


@pytest.fixture(scope="module")
def critic_job(tmp_path_factory):
    """Three models on separate workers, and a checkpoint of step 2."""
    return run_arith(
        tmp_path_factory.mktemp("runs"),
        "critic",
        *CRITIC,
        "allocation=sglang.d1+actor.d1,ref.d1+critic.m2",
        "roles.ref.offload=all",
        "checkpoint.every_steps=2",
        "train.total_steps=3",
    ).completed()


def test_critic_and_reference_run_on_separate_workers(critic_job):
    check_finite(critic_job, "loss", "advantages/return_mean", "critic_train/loss", "critic_train/grad_norm")
    first = critic_job.records("train")[0]["stats"]
    assert first["advantages/kl_ref_mean"] == pytest.approx(0, abs=1e-6), "the reference is the warmed-up actor"
    assert undocumented(StepTail(critic_job.paths.steps).records()) == set()
    check_ledger(critic_job, batch_groups=8, eta=4, prompts=400)
    check_staleness(critic_job, 4)


def test_run_resumes_in_another_layout(critic_job, tmp_path):
    """Steps, versions, schedule and prompts continue from the checkpoint; admission is right from the start.

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
    check_finite(second, "loss", "critic_train/loss")
    kl = second.records("train")[0]["stats"]["advantages/kl_ref_mean"]
    assert 0 < kl < 0.2, "against the model before the warm-up it would be above 1"
    assert [step["step"] for step in second.records("train")] == [3, 4, 5]
    assert not second.records("warmup")
    check_staleness(second, 4)
    assert (second.root / "checkpoints" / "step-00000005").is_dir()
