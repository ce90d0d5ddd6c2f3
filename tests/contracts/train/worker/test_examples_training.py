"""The examples of docs/examples take real optimizer steps."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from realsys.config.dataflow import dataflow_of
from realsys.config.schema import Config
from realsys.launch.cli import main
from tests.support.data.data_rows import FEW_ROWS
from tests.support.training.ppo_batch import Worker, make_batch, whole
from tests.support.training.train_ranks import run_ranks

EXAMPLES = Path(__file__).resolve().parents[4] / "docs" / "examples"
REFS, ARRAYS = make_batch()


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    for name in ("loss", "distill"):
        sys.modules.pop(name, None)


def make_config(**ppo):
    train = {"microbatch_tokens": 48, "ppo": ppo}
    return Config.model_validate({"train": train, "roles": {"teacher": {}}})


def weights(worker):
    return {name: tensor.clone() for name, tensor in worker.roles["actor"].engine.export()}


@pytest.mark.parametrize(("layout", "ranks"), [("d1", 1), ("d2", 2)])
def test_own_loss_trains(folders, layout, ranks):
    config = make_config(loss="loss:episode_spo", loss_args={"eps": 0.1}, aggregation="sequence")

    def body(rank, device):
        worker = Worker(rank, device, config, whole(layout, "actor"), folders)
        worker.fill(ARRAYS)
        worker.call("actor_inf", "actor", [REFS[:4], REFS[4:]])
        before = weights(worker)
        stats = worker.call("actor_train", "actor", [REFS[:4], REFS[4:]], lr=1e-3).stats
        return stats, any(not torch.equal(tensor, before[name]) for name, tensor in weights(worker).items())

    for stats, moved in run_ranks(ranks, body, config):
        assert (stats["optimizer_steps"], stats["skipped_steps"]) == (2, 0)
        assert moved and stats["grad_norm"] > 0 and np.isfinite(stats["loss"])


def test_distillation_trains_on_the_teachers_advantages(folders):
    """The advantages are log p_teacher - log p_sampled, in the batch statistics and in the optimizer step."""
    config = make_config(algorithm="distill:distill", advantage={"mean": "none", "std": "none"})
    calls = {call.name: call.handler for call in dataflow_of(config).calls}
    assert list(calls) == ["teacher_inf", "actor_inf", "advantages", "actor_train"]

    def body(rank, device):
        models = {**folders, "teacher": folders["ref"]}
        worker = Worker(rank, device, config, whole("d1", "actor", "teacher"), models)
        worker.fill(ARRAYS)
        worker.call(calls["teacher_inf"], "teacher", [REFS])
        worker.call(calls["actor_inf"], "actor", [REFS])
        found = worker.call(calls["advantages"], "actor", [REFS]).stats
        gains = [worker.data.get(ref.sample_id, "advantages") for ref in REFS]
        expected = [
            worker.data.get(ref.sample_id, "ref_logprobs") - worker.data.get(ref.sample_id, "behav_logprobs")
            for ref in REFS
        ]
        before = weights(worker)
        stats = worker.call("actor_train", "actor", [REFS], lr=1e-3).stats
        moved = any(not torch.equal(tensor, before[name]) for name, tensor in weights(worker).items())
        return found, np.concatenate(gains), np.concatenate(expected), stats, moved

    [(found, gains, expected, stats, moved)] = run_ranks(1, body, config)
    np.testing.assert_array_equal(gains, expected)
    assert found == pytest.approx({"tokens": len(gains), "advantage_mean": gains.mean()}, rel=1e-5)
    assert stats["optimizer_steps"] == 1 and moved and np.isfinite(stats["loss"])


def test_launcher_takes_the_algorithm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["train.ppo.algorithm=distill:distill", "train.ppo.skip_zero_advantage=false"]
    arguments += ["roles.teacher={}", "allocation=sglang.d1+actor.d1+teacher.d1"]
    assert main(["run", "experiment=arith", *FEW_ROWS, *arguments, "--dry-run"]) == 0
