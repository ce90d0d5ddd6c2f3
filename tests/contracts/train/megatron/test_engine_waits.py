"""How often the host reads a value of the device in an optimizer step. On a GPU it waits for all queued work then."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.serving.hf_models import make_model
from tests.support.training.engine_ranks import NLL, make_config, make_settings, on_ranks

_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default)


class Reads(TorchDispatchMode):
    """Counts operations whose result the host needs."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in _READS
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("actor")
    make_model().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_waits_of_a_step_do_not_grow(path, dtype):
    """The norm of all parameters is one value, not one value for each of them."""

    def body(rank):
        settings = make_settings().optimizer.model_copy(update={"clip_grad": 1e-6})
        rank.engine.use_optimizer("train", settings)
        rank.engine.accumulate(rank.micro_batches(1), NLL)
        rank.engine.step(1e-3)  # makes the state of the optimizer
        rank.engine.accumulate(rank.micro_batches(1), NLL)
        with Reads() as reads:
            assert rank.engine.step(1e-3).applied
        return reads.count

    [count] = on_ranks("d1", path, body, make_config(dtype), make_settings())
    assert count <= 4
