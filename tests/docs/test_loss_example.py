"""docs/examples/loss.py: its numbers by hand, and the launcher takes it."""

import sys
from pathlib import Path

import pytest
import torch

from realsys.algorithm.loss import actor_loss
from realsys.algorithm.loss_tokens import Segments
from realsys.config.schema_train import PPOConfig
from realsys.launch.cli import main
from tests.support.data.data_rows import FEW_ROWS

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    """The folder of the examples on the path; no module named ``loss`` stays behind."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    sys.modules.pop("loss", None)


def run(cfg):
    """u = e^0.2, e^0.1 | e^-0.3 and w = 1, of two rows; advantages 2, -1 | -1."""
    prox = torch.tensor([-1.2, -1.5, -1.5])
    theta = (prox + torch.tensor([0.2, 0.1, -0.3])).requires_grad_()
    advantages, mask = torch.tensor([2.0, -1.0, -1.0]), torch.ones(3, dtype=torch.bool)
    loss, stats = actor_loss(theta, prox, prox, advantages, mask, 1.0, cfg, segments=Segments(torch.tensor([2, 1])))
    [gradient] = torch.autograd.grad(loss, theta)
    return loss.item(), gradient.tolist(), {name: value.item() for name, value in stats.items()}


def test_spo_is_the_formula_of_its_paper():
    loss, gradient, _ = run(PPOConfig(loss="loss:spo", loss_args={"eps": 0.25}))
    # |A| / (2 * 0.25) = 4, 2, 2 times (u - 1)^2, less u * A
    terms = [4 * 0.0490192 - 2.4428055, 2 * 0.0110609 + 1.1051709, 2 * 0.0671755 + 0.7408182]
    assert loss == pytest.approx(sum(terms), rel=1e-5)
    # d/dtheta = u * (2 * c * (u - 1) - A)
    expected = [1.2214028 * (8 * 0.2214028 - 2), 1.1051709 * (4 * 0.1051709 + 1), 0.7408182 * (4 * -0.2591818 + 1)]
    assert gradient == pytest.approx(expected, rel=1e-5)


def test_episode_spo_has_one_ratio_per_episode():
    loss, _, stats = run(PPOConfig(loss="loss:episode_spo", loss_args={"eps": 0.2}))
    # u = e^0.15 for both tokens of the first row
    first, second = 0.1618342**2 / 0.4, 0.2591818**2 / 0.4
    assert loss == pytest.approx(2 * first - 2 * 1.1618342 + first + 1.1618342 + second + 0.7408182, rel=1e-5)
    assert stats["clip_count"] == 1  # the second row is beyond 0.2


@pytest.mark.parametrize("name", ["spo", "episode_spo"])
def test_launcher_takes_the_example(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [f"train.ppo.loss=loss:{name}", "train.ppo.loss_args.eps=0.3"]
    assert main(["run", "experiment=arith", *FEW_ROWS, *arguments, "--dry-run"]) == 0


def test_launcher_refuses_an_argument_it_does_not_take(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["train.ppo.loss=loss:spo", "train.ppo.loss_args.epsilon=0.3"]
    assert main(["run", "experiment=arith", *FEW_ROWS, *arguments]) == 2
    error = capsys.readouterr().err
    assert "train.ppo.loss_args={'epsilon': 0.3}: do not fit loss:spo: got an unexpected" in error
    assert error.count("\n") == 1
