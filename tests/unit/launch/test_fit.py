"""Settings that the user left open adapt to the machine; those that were given do not."""

from __future__ import annotations

import pytest

from realsys.config.rules.machine import Machine
from realsys.config.schema import Config
from realsys.launch.fit import fit


def machine(gpus: int) -> Machine:
    return Machine(cpus=8, memory_bytes=64 << 30, gpus=tuple(map(str, range(gpus))), torch_has_cuda=gpus > 0)


@pytest.mark.parametrize(
    ("gpus", "allocation"),
    [(0, "serve.d1+d1"), (1, "serve.d1+d1"), (2, "serve.d1+d1"), (4, "serve.d3+d1"), (8, "serve.d6+d2")],
)
def test_automatic_allocation_divides_the_gpus(gpus: int, allocation: str) -> None:
    config, lines = fit(Config(allocation="auto"), {"generation"}, machine(gpus))
    assert config.allocation == allocation
    assert len(lines) == 1 and lines[0].startswith(f"set allocation={allocation}: this machine has ")


def test_other_allocations_stay_as_they_are() -> None:
    config = Config(allocation="serve.d1+d2")
    assert fit(config, {"generation"}, machine(8)) == (config, [])


@pytest.mark.parametrize(
    ("gpus", "given", "embedded", "backend"),
    [
        (1, set(), {}, "sglang"),
        (0, set(), {}, "embedded"),
        (1, {"generation"}, {}, "embedded"),
        (1, {"generation.backend"}, {}, "embedded"),
        (1, set(), {"on_gpu": True}, "embedded"),
    ],
)
def test_open_engine_on_gpus_is_sglang(gpus: int, given: set[str], embedded: dict[str, bool], backend: str) -> None:
    config = Config.model_validate({"generation": {"embedded": embedded}})
    config, lines = fit(config, given, machine(gpus))
    assert config.generation.backend == backend
    assert lines == (["set generation.backend=sglang: this machine has GPUs"] if backend == "sglang" else [])
