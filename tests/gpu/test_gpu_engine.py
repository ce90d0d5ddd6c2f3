"""The trainer's engine on a GPU against the same engine on the CPU, and its memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from realsys.config.sections.schema_train import OptimizerConfig
from realsys.train.calls import Role
from realsys.train.checkpoint.saver import load_checkpoint
from tests.gpu.conftest import ComputeOn
from tests.support.serving.hf_models import FAMILIES, make_model, weights_of
from tests.support.training.checkpoint_ranks import Setup, checkpoint, everything, make_models
from tests.support.training.engine_ranks import NLL, Rank, make_config, make_settings, on_ranks

pytestmark = pytest.mark.gpu
Found = dict[str, dict[str, torch.Tensor]]
STEPS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"recompute": True},
    "chunked head": {"head_chunk_tokens": 8},
    "distributed optimizer": {"distributed_optimizer": True},
    "overlapped reduction": {"overlap_grad_reduce": True},
    "LoRA": {"lora": {"rank": 4}},
}


def on_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.float().cpu() for name, tensor in tensors.items()}


def results(rank: Rank) -> Found:
    """Log-probs, gradients, and the weights after a few steps of AdamW."""
    engine = rank.engine
    logprobs = torch.cat(engine.logprobs(rank.micro_batches()))
    engine.use_optimizer("train", OptimizerConfig())
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(STEPS):
        engine.accumulate(rank.micro_batches(), NLL)
        gradients = gradients or on_host(rank.gradients())
        assert engine.step(1e-3).applied
    return {"logprobs": on_host({"": logprobs}), "gradients": gradients, "weights": on_host(rank.weights())}


def run_on(device: str, compute_on: ComputeOn, path: Path, dtype: str, train: dict[str, Any]) -> Found:
    compute_on(device)
    (found,) = on_ranks("d1", path, results, make_config(dtype, **train), make_settings())
    return found


def assert_near(found: Found, expected: Found, tolerance: float) -> None:
    """The error of each tensor, relative to the largest norm of its kind, is below ``tolerance``."""
    for kind, tensors in expected.items():
        assert found[kind].keys() == tensors.keys()
        scale = max(tensor.norm().item() for tensor in tensors.values())
        for name, tensor in tensors.items():
            assert (found[kind][name] - tensor).norm().item() < tolerance * scale, (kind, name)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_families_agree_with_the_cpu(family: str, tied: bool, tmp_path: Path, compute_on: ComputeOn) -> None:
    make_model(family, tied=tied).save_pretrained(tmp_path)
    expected = run_on("cpu", compute_on, tmp_path, "float32", {})
    assert_near(run_on("gpu", compute_on, tmp_path, "float32", {}), expected, 1e-4)
    assert_near(run_on("gpu", compute_on, tmp_path, "bfloat16", {}), expected, 5e-2)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "plain"])
def test_settings_agree_with_the_cpu(name: str, tmp_path: Path, compute_on: ComputeOn) -> None:
    make_model().save_pretrained(tmp_path)
    expected = run_on("cpu", compute_on, tmp_path, "float32", SETTINGS[name])
    assert_near(run_on("gpu", compute_on, tmp_path, "float32", SETTINGS[name]), expected, 1e-4)


def test_value_head_agrees_with_the_cpu(tmp_path: Path, compute_on: ComputeOn) -> None:
    make_model(value=True).save_pretrained(tmp_path)

    def values(rank: Rank) -> torch.Tensor:
        return torch.cat(rank.engine.values(rank.micro_batches())).cpu()

    found = []
    for device in ("gpu", "cpu"):
        compute_on(device)
        found += on_ranks("d1", tmp_path, values, make_config(), make_settings("value"))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_export_gives_back_the_loaded_weights(tmp_path: Path, compute_on: ComputeOn) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    compute_on("gpu")
    (found,) = on_ranks("d1", tmp_path, lambda rank: on_host(rank.weights()), make_config(), make_settings())
    assert all(torch.equal(found[name], tensor) for name, tensor in weights_of(model).items())


@pytest.mark.parametrize(("written", "read"), [("cpu", "gpu"), ("gpu", "cpu")])
def test_checkpoint_moves_between_devices_bit_by_bit(
    written: str, read: str, tmp_path: Path, compute_on: ComputeOn
) -> None:
    models = make_models(tmp_path / "models")
    setup = Setup(dtype="bfloat16")
    compute_on(written)
    directory, _ = checkpoint(setup, models["untied"], tmp_path / "run")
    loaded = [state_after_load(setup, device, directory, models["untied"], compute_on) for device in (written, read)]
    assert loaded[0].keys() == loaded[1].keys() and len(loaded[0]) > 10
    assert all(torch.equal(tensor, loaded[1][name]) for name, tensor in loaded[0].items())


def state_after_load(
    setup: Setup, device: str, directory: Path, model: Path, compute_on: ComputeOn
) -> dict[str, torch.Tensor]:
    compute_on(device)
    (found,) = setup.run(partial(load_and_look, directory=directory), model)
    return found


def load_and_look(role: Role, directory: Path) -> dict[str, torch.Tensor]:
    """Return weights, masters and moments on the host; random states belong to a device."""
    load_checkpoint(role, directory)
    state = everything(role)
    return {name: x.cpu() for name, x in state.items() if isinstance(x, torch.Tensor) and name != "rng"}


def test_offloaded_memory_is_free_and_comes_back(tmp_path: Path, compute_on: ComputeOn) -> None:
    make_model(hidden_size=256, intermediate_size=1024).save_pretrained(tmp_path)
    compute_on("gpu")

    def body(rank: Rank) -> tuple[list[int], bool]:
        engine = rank.engine
        engine.use_optimizer("train", OptimizerConfig())
        engine.accumulate(rank.micro_batches(), NLL)
        assert engine.step(1e-3).applied
        before, used = rank.weights(), [torch.cuda.memory_allocated()]
        expected = on_host(before)
        del before
        engine.offload()
        used.append(torch.cuda.memory_allocated())
        engine.onload()
        return used, all(torch.equal(x, expected[name]) for name, x in on_host(rank.weights()).items())

    ((used, equal),) = on_ranks("d1", tmp_path, body, make_config(), make_settings(offload="all"))
    assert equal and used[1] <= 0.2 * used[0]
