"""Choice of the allocation by memory."""

import pytest

from realsys.config.allocation import parse_allocation
from realsys.config.device_memory import GIB
from realsys.config.fields import replaced
from realsys.config.memory_remedies import ranks_fit, smallest_training
from tests.unit.config.test_device_memory import math_config

H100 = 79 * GIB


@pytest.mark.parametrize("gpus", [8, 16, 64])
@pytest.mark.parametrize("name", ["1.5B", "7B", "14B"])
def test_chosen_allocation_uses_all_gpus_and_fits(name, gpus, tmp_path):
    config = math_config(tmp_path, name, "generation.backend=sglang")
    text = smallest_training(config, gpus, H100)
    assert text is not None
    allocation = parse_allocation(text)
    assert allocation.workers + allocation.inference.world_size == gpus
    assert ranks_fit(replaced(config, ["allocation"], text), H100)


def test_larger_gpus_need_fewer_training_ranks(tmp_path):
    config = math_config(tmp_path, "7B", "generation.backend=sglang")
    assert smallest_training(config, 8, 140 * GIB) == "serve.d6+d2"


def test_tensor_ranks_divide_the_heads(tmp_path):
    """7B has 28 heads: m8 is impossible, so small GPUs get pipeline stages."""
    config = math_config(tmp_path, "7B", "generation.backend=sglang")
    text = smallest_training(config, 16, 39 * GIB)
    assert text is not None and parse_allocation(text).actor.tensor in (1, 2, 4)


def test_embedded_engine_cannot_split_a_model(tmp_path):
    config = math_config(tmp_path, "32B", "generation.backend=embedded")
    assert smallest_training(config, 64, H100) is None


@pytest.mark.parametrize(
    ("args", "allocation"),
    [("{tp-size: 2}", "serve.d2+d2m2"), ("{pp-size: 4}", "serve.d1+d2m2"), ("{dp-size: 3}", "serve.d2+d1m2")],
)
def test_servers_have_the_gpus_of_their_options(args, allocation, tmp_path):
    config = math_config(tmp_path, "7B", "generation.backend=sglang", f"generation.sglang.args={args}")
    assert smallest_training(config, 8, H100) == allocation
