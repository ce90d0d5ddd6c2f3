"""The loops of tinker-cookbook, unchanged, against `realsys serve`."""

import pytest

from tests.support.jobs.jobs import realsys
from tests.support.tinker.loops import ASYNC_RL, RL, SL
from tests.tinker.conftest import Service

pytestmark = [pytest.mark.system, pytest.mark.needs(package="tinker_cookbook")]

#: two steps of 8 prompts
SHORT = {"batch_size": 8, "max_steps": 2, "learning_rate": 1e-3}


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo", "gspo"])
def test_rl_loop_trains_with_each_loss(service: Service, loss: str):
    ended = service.loop(RL, loss, **SHORT, group_size=16, max_tokens=12, loss_fn=loss).completed()
    steps = ended.rows("metrics.jsonl")
    assert [step["progress/batch"] for step in steps] == [0, 1]
    assert all(0 < step["reward/total"] < 1 for step in steps), "without signal there is no training step"
    [saved] = ended.rows("checkpoints.jsonl")
    assert saved["state_path"].startswith("tinker://") and saved["sampler_path"].startswith("tinker://")


def test_default_loss_is_refused_by_its_name(service: Service):
    ended = service.loop(RL, "default", **SHORT, group_size=4, max_tokens=12)
    error = ended.output.rpartition("Traceback")[2]
    assert ended.exitcode != 0 and "stable_reinforce" in error


def test_rl_loop_continues_from_its_state(service: Service):
    settings = {"group_size": 16, "max_tokens": 12, "loss_fn": "importance_sampling", "save_every": 1}
    service.loop(RL, "continued", **SHORT, **settings).completed()
    ended = service.loop(RL, "continued", **SHORT | {"max_steps": 4}, **settings).completed()
    assert "Resuming from batch" in ended.output


def test_supervised_loop_lowers_its_loss(service: Service):
    ended = service.loop(SL, "supervised", **SHORT | {"max_steps": 6, "learning_rate": 1e-2}).completed()
    losses = [step["train_mean_nll"] for step in ended.rows("metrics.jsonl")]
    assert len(losses) == 6 and losses[-1] < 0.7 * losses[0]


def test_async_trainer_trains_off_policy(service: Service):
    """It samples while it trains, evaluates, and stops at text, not at a token."""
    ended = service.loop(
        ASYNC_RL,
        "async",
        env="gsm8k",
        renderer_name="role_colon",
        loss_fn="importance_sampling",
        max_steps_off_policy=1,
        groups_per_batch=4,
        group_size=8,
        max_tokens=12,
        max_steps=3,
        eval_every=2,
        save_every=2,
        learning_rate=1e-3,
    ).completed()
    assert len(ended.rows("metrics.jsonl")) >= 3


def test_service_shows_and_audits_its_clients(service: Service):
    service.live.until(lambda: "me  " in service.live.job.stdout, "a line about a client")
    root = service.live.root
    assert "clients: base_url=" in realsys("status", root).stdout
    audited = realsys("audit", root)
    assert audited.returncode == 0, audited.stdout
