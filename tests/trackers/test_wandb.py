"""The W&B library, offline: the rows in its file."""

import json

import pytest

from tests.support.run_logs import evaluation, recovered, train, warmup
from tests.support.telemetry.wandb_files import history

pytestmark = pytest.mark.needs(package="wandb")

OFFLINE = {"mode": "offline", "project": "mine", "tags": ["a"]}


@pytest.fixture(autouse=True)
def no_reports(monkeypatch):
    """W&B reports its own errors from threads that last."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def rows(followed):
    """Return (number, train step, reward) of the rows of train steps."""
    found = [row for row in history(followed.folder) if "train/step" in row]
    return [(row["_step"], row["train/step"], row["train/reward_mean"]) for row in found]


def test_rows_have_their_own_axes(followed):
    followed.play("wandb", [warmup(7), evaluation(0), train(1)], **OFFLINE)
    first, second, third = history(followed.folder)
    assert (first["warmup/step"], first["warmup/loss"]) == (7, pytest.approx(1 / 7))
    assert (second["eval/step"], second["eval/eval/accuracy"]) == (0, 0)
    assert (third["train/step"], third["train/reward_mean"], third["_step"]) == (1, 10, 2)


def test_restart_continues_the_same_run(followed):
    followed.play("wandb", [train(1), train(2)], [train(3)], **OFFLINE)
    assert rows(followed) == [(0, 1, 10), (1, 2, 20), (2, 3, 30)]
    runs = {path.name.rpartition("/")[2] for path in followed.folder.glob("wandb/offline-run-*/*.wandb")}
    state = json.loads((followed.folder / "trackers" / "wandb.json").read_text())["state"]
    assert runs == {f"run-{state['run_id']}.wandb"} and state["run_id"].startswith("first-")


def test_roll_back_goes_on_with_new_numbers(followed):
    followed.play("wandb", [train(1), train(2), recovered(1), train(2, reward_mean=-1.0)], **OFFLINE)
    assert rows(followed) == [(0, 1, 10), (1, 2, 20), (2, 2, -1)]
