"""Description of the machine: CPU cores, memory and visible GPUs."""

from __future__ import annotations

import pytest

from realsys.config.machine import Machine, visible_gpus
from realsys.errors import ConfigError


def test_machine_describes_this_one() -> None:
    here = Machine.here({"CUDA_VISIBLE_DEVICES": ""})
    assert here.cpus >= 1 and here.memory_bytes > 1 << 20
    assert here.gpus == () and here.node().gpus == 0


@pytest.mark.parametrize(
    ("chosen", "gpus"),
    [
        (None, "0 1 2"),
        ("2,0", "2 0"),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("1,-1,2", "1"),
        ("0,7", "0"),
        ("GPU-ab", "GPU-ab"),
    ],
)
def test_visible_gpus_are_those_that_cuda_shows(chosen: str | None, gpus: str) -> None:
    assert visible_gpus(chosen, present=3) == tuple(gpus.split())


def test_gpu_that_is_visible_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES='0,0': names a GPU twice"):
        visible_gpus("0,0", present=1)
