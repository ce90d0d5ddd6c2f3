"""Memory that an engine gives up between its calls: really released, and back bit by bit."""

import pytest
import torch

from realsys.config.allocation import ACTOR, ParallelLayout
from realsys.config.fields import Offload
from realsys.config.schema_train import OptimizerConfig
from realsys.errors import ModelError
from realsys.train.megatron.train_engine import MegatronEngine
from tests.support.serving.hf_models import make_model
from tests.support.training.engine_ranks import NLL, make_config, make_settings, on_ranks
from tests.support.training.train_ranks import FORMED, run_ranks

ADAM = OptimizerConfig()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("actor")
    make_model().save_pretrained(folder)
    return folder


def memory(rank):
    """Return all tensors of the engine by kind."""
    engine = rank.engine
    found = {"parameters": [parameter.data for parameter in engine.module.parameters()]}
    if engine.ddp_model is not None:
        found["gradients"] = [buffer.grad_data for buffer in engine.ddp_model.buffers]
    if engine.optimizer is not None:
        stepped = [p.data for group in engine.optimizer.param_groups for p in group["params"]]
        kept = {parameter.untyped_storage().data_ptr() for parameter in found["parameters"]}
        found["masters"] = [p for p in stepped if p.untyped_storage().data_ptr() not in kept]
        states = [part.optimizer.state for part in engine.optimizer.chained_optimizers]
        found["state"] = [x for state in states for values in state.values() for x in values.values()]
    return found


def sizes(tensors):
    """Return True if the tensors have memory."""
    return {tensor.untyped_storage().nbytes() > 0 for tensor in tensors}


def step(rank):
    rank.engine.use_optimizer("train", ADAM)
    rank.engine.accumulate(rank.micro_batches(), NLL)
    assert rank.engine.step(0.01).applied


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_everything_goes_and_comes_back_bit_by_bit(dtype, distributed, path):
    def body(rank):
        engine = rank.engine
        offload = engine.settings.offload
        step(rank)
        before = {kind: [tensor.clone() for tensor in tensors] for kind, tensors in memory(rank).items()}
        tensors = memory(rank)
        for _ in range(2):  # twice is as good as once
            engine.offload()
        assert sizes(tensors["gradients"]) == sizes(tensors["state"]) == {False}
        assert sizes(tensors["masters"]) <= {False}
        assert bool(tensors["masters"]) == (dtype == "bfloat16"), "fp32 parameters are their own masters"
        assert sizes(tensors["parameters"]) == ({False} if offload == "all" else {True})
        for _ in range(2):
            engine.onload()
        after = memory(rank)
        for kind in ("parameters", "masters", "state"):
            assert all(torch.equal(a, b) for a, b in zip(after[kind], before[kind], strict=True))
        assert not any(tensor.any() for tensor in after["gradients"])
        step(rank)
        return rank.weights()

    def uninterrupted(rank):
        step(rank)
        step(rank)
        return rank.weights()

    config = make_config(dtype, distributed_optimizer=distributed)
    stayed = on_ranks("d2", path, uninterrupted, config, make_settings())
    modes: list[Offload] = ["optimizer", "all"]
    for mode in modes:
        moved = on_ranks("d2", path, body, config, make_settings(offload=mode))
        for a, b in zip(moved, stayed, strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_offloaded_engine_refuses_calls_that_need_memory(path):
    def body(rank):
        engine, batches = rank.engine, rank.micro_batches()
        step(rank)
        expected = engine.logprobs(batches)
        engine.offload()
        gone = engine.settings.offload == "all"
        for call in (
            lambda: engine.accumulate(batches, NLL),
            lambda: engine.step(0.1),
            lambda: engine.use_optimizer("warmup", ADAM),
            lambda: list(engine.export("gradients")),
        ):
            with pytest.raises(ModelError, match="role actor.* offloaded: call 'onload' first"):
                call()
        if gone:
            for call in (lambda: engine.logprobs(batches), lambda: list(engine.export())):
                with pytest.raises(ModelError, match="model of role actor is offloaded: call 'onload' first"):
                    call()
        else:
            assert all(torch.equal(a, b) for a, b in zip(engine.logprobs(batches), expected, strict=True))
            assert list(engine.export())

    for offload in ("optimizer", "all"):
        on_ranks("d1", path, body, make_config(), make_settings(offload=offload))  # type: ignore[arg-type]


def test_a_frozen_engine_moves_its_parameters(path):
    def body(rank):
        engine, batches = rank.engine, rank.micro_batches()
        expected = engine.logprobs(batches)
        engine.offload()
        assert sizes(memory(rank)["parameters"]) == {False}
        engine.onload()
        assert all(torch.equal(a, b) for a, b in zip(engine.logprobs(batches), expected, strict=True))

    on_ranks("d1", path, body, make_config(), make_settings(offload="all"), trainable=False)


def test_without_the_setting_nothing_moves(path):
    def body(rank):
        step(rank)
        rank.engine.offload()
        assert {size for tensors in memory(rank).values() if tensors for size in sizes(tensors)} == {True}
        step(rank)

    on_ranks("d1", path, body, make_config(), make_settings())


def test_before_it_is_loaded_an_engine_says_so(path):
    config = make_config()

    def body(rank, device):
        engine = MegatronEngine(config, make_settings(offload="all"), FORMED[ACTOR], device)
        for call in (engine.offload, lambda: engine.logprobs([]), lambda: engine.parameter_count):
            with pytest.raises(ModelError, match="this ModelWorker has no model yet: send 'initialize' first"):
                call()

    run_ranks(1, body, config, ParallelLayout())
