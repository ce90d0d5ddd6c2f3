"""The trainer's engine on a GPU against the same engine on the CPU, and its memory."""

from functools import partial
from typing import Any

import pytest
import torch

from realsys.config.fields import replaced
from realsys.config.schema_train import OptimizerConfig
from realsys.train.checkpoint.saver import load_checkpoint
from realsys.train.megatron.train_engine import optimizer_tensors
from realsys.weights.low_rank import merged
from tests.gpu.conftest import STAND_IN
from tests.support.serving.hf_models import FAMILIES, make_model, weights_of
from tests.support.training.checkpoint_ranks import Setup, checkpoint, everything, make_models
from tests.support.training.engine_ranks import NLL, make_config, make_settings, on_ranks

pytestmark = pytest.mark.gpu
STEPS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"recompute": True},
    "chunked head": {"head_chunk_tokens": 8},
    "distributed optimizer": {"distributed_optimizer": True},
    "overlapped reduction": {"overlap_grad_reduce": True},
    "LoRA": {"lora": {"rank": 4}},
    "as on GPUs by default": {
        "recompute": True,
        "head_chunk_tokens": 8,
        "distributed_optimizer": True,
        "sequence_parallel": True,
    },
}
#: The stand-in compares the CPU with itself, which differs for no family.
COMPARED = ["qwen3"] if STAND_IN else sorted(FAMILIES)
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "d2": ("d2", {"distributed_optimizer": True}),
    "m2": ("m2", {}),
    "m2 with sequence parallelism": ("m2", {"sequence_parallel": True}),
    "p2": ("p2", {}),
    "p2 with recompute": ("p2", {"recompute": True}),
}


def on_host(tensors):
    return {name: tensor.float().cpu() for name, tensor in tensors.items()}


def results(rank):
    """Log-probs, gradients, and the weights after a few steps of AdamW."""
    engine = rank.engine
    scored = engine.logprobs(rank.micro_batches())  # on the last stage only
    engine.use_optimizer("train", OptimizerConfig())
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(STEPS):
        engine.accumulate(rank.micro_batches(), NLL)
        gradients = gradients or on_host(rank.gradients())
        assert engine.step(1e-3).applied
    logprobs = on_host({str(number): each for number, each in enumerate(scored)})
    return {"logprobs": logprobs, "gradients": gradients, "weights": on_host(rank.weights())}


def run_on(device, compute_on, path, dtype, train, layout="d1", head="model"):
    """Return the results of all ranks. ``head``: dtype of the logits."""
    compute_on(device)
    config = replaced(make_config(dtype, **train), ["model", "head_dtype"], head)
    return on_ranks(layout, path, results, config, make_settings())


def assert_near(found, expected, tolerance):
    """The error of each tensor, relative to the largest norm of its kind, is below ``tolerance``."""
    for ours, theirs in zip(found, expected, strict=True):
        for kind, tensors in theirs.items():
            assert ours[kind].keys() == tensors.keys()
            scale = max((tensor.norm().item() for tensor in tensors.values()), default=0.0)
            for name, tensor in tensors.items():
                assert (ours[kind][name] - tensor).norm().item() < tolerance * scale, (kind, name)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", COMPARED)
def test_families_agree_with_the_cpu(family, tied, tmp_path, compute_on):
    make_model(family, tied=tied).save_pretrained(tmp_path)
    expected = run_on("cpu", compute_on, tmp_path, "float32", {})
    assert_near(run_on("gpu", compute_on, tmp_path, "float32", {}), expected, 1e-4)
    assert_near(run_on("gpu", compute_on, tmp_path, "bfloat16", {}), expected, 5e-2)
    train = {"head_chunk_tokens": 8}
    assert_near(run_on("gpu", compute_on, tmp_path, "bfloat16", train, head="float32"), expected, 5e-2)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "plain"])
def test_settings_agree_with_the_cpu(name, tmp_path, compute_on):
    make_model().save_pretrained(tmp_path)
    expected = run_on("cpu", compute_on, tmp_path, "float32", SETTINGS[name])
    assert_near(run_on("gpu", compute_on, tmp_path, "float32", SETTINGS[name]), expected, 1e-4)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_agree_with_the_cpu(name, tmp_path, compute_on):
    """Two ranks over NCCL against two ranks over gloo."""
    make_model().save_pretrained(tmp_path)
    layout, train = LAYOUTS[name]
    expected = run_on("cpu", compute_on, tmp_path, "float32", train, layout)
    assert_near(run_on("gpu", compute_on, tmp_path, "float32", train, layout), expected, 1e-4)
    assert_near(run_on("gpu", compute_on, tmp_path, "bfloat16", train, layout), expected, 5e-2)


def test_deterministic_steps_are_bit_equal(tmp_path, compute_on):
    """An operation without a deterministic kernel would raise. bfloat16: with the attention kernel."""
    make_model().save_pretrained(tmp_path)
    train = SETTINGS["as on GPUs by default"] | {"deterministic": True}
    found = [run_on("gpu", compute_on, tmp_path, "bfloat16", train)[0] for _ in range(2)]
    for kind, tensors in found[0].items():
        assert all(torch.equal(found[1][kind][name], tensor) for name, tensor in tensors.items()), kind


def test_value_head_agrees_with_the_cpu(tmp_path, compute_on):
    make_model(value=True).save_pretrained(tmp_path)

    def values(rank):
        return torch.cat(rank.engine.values(rank.micro_batches())).cpu()

    found = []
    for device in ("gpu", "cpu"):
        compute_on(device)
        found += on_ranks("d1", tmp_path, values, make_config(), make_settings("value"))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_export_gives_back_the_loaded_weights(tmp_path, compute_on):
    model = make_model()
    model.save_pretrained(tmp_path)
    compute_on("gpu")
    (found,) = on_ranks("d1", tmp_path, lambda rank: on_host(rank.weights()), make_config(), make_settings())
    assert all(torch.equal(found[name], tensor) for name, tensor in weights_of(model).items())


@pytest.mark.parametrize(("written", "read"), [("cpu", "gpu"), ("gpu", "cpu")])
def test_checkpoint_moves_between_devices_bit_by_bit(written, read, tmp_path, compute_on):
    models = make_models(tmp_path / "models")
    setup = Setup(dtype="bfloat16")
    compute_on(written)
    directory, _ = checkpoint(setup, models["untied"], tmp_path / "run")
    loaded = [state_after_load(setup, device, directory, models["untied"], compute_on) for device in (written, read)]
    assert loaded[0].keys() == loaded[1].keys() and len(loaded[0]) > 10
    assert all(torch.equal(tensor, loaded[1][name]) for name, tensor in loaded[0].items())


def state_after_load(setup, device, directory, model, compute_on):
    compute_on(device)
    (found,) = setup.run(partial(load_and_look, directory=directory), model)
    return found


def load_and_look(role, directory):
    """Return weights, masters and moments on the host; random states belong to a device."""
    load_checkpoint(role, directory)
    state = everything(role)
    return {name: x.cpu() for name, x in state.items() if isinstance(x, torch.Tensor) and name != "rng"}


def test_offloaded_memory_is_free_and_comes_back(tmp_path, compute_on):
    make_model(hidden_size=256, intermediate_size=1024).save_pretrained(tmp_path)
    compute_on("gpu")

    def body(rank):
        engine = rank.engine
        engine.use_optimizer("train", OptimizerConfig())
        engine.accumulate(rank.micro_batches(), NLL)
        assert engine.step(1e-3).applied
        expected = on_host(rank.weights())
        gradients = [buffer.grad_data for buffer in engine.ddp_model.buffers]
        states = [*engine.module.parameters(), *optimizer_tensors(engine.optimizer), *gradients]
        held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in states if x.is_cuda}
        used = torch.cuda.memory_allocated()
        engine.offload()
        released = used - torch.cuda.memory_allocated()
        engine.onload()
        equal = all(torch.equal(x, expected[name]) for name, x in on_host(rank.weights()).items())
        return released, sum(held.values()), equal

    ((released, held, equal),) = on_ranks("d1", tmp_path, body, make_config(), make_settings(offload="all"))
    assert equal and released >= held and bool(held) is not STAND_IN


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rank", [1, 16, 33])
def test_adapters_merge_with_the_bits_of_a_cpu(rank, dtype):
    """The trainer merges on its GPU, servers on their CPUs; a version is served if the bits are the same."""
    random = torch.Generator().manual_seed(rank)
    base, a, b = (torch.randn(shape, generator=random) for shape in ((5000, 4000), (rank, 4000), (5000, rank)))
    tensors = [(base * 0.02).to(dtype), a.to(dtype), (b * 1e-3).to(dtype)]
    device = "cpu" if STAND_IN else "cuda"
    found = merged(*(tensor.to(device) for tensor in tensors), scale=2 / 3)
    assert torch.equal(found.cpu(), merged(*tensors, scale=2 / 3))
