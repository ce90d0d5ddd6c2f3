"""Memory of a role that leaves a device without other memory goes to a file, and comes back, or the cause is named."""

import tempfile

import pytest
import torch

from realsys.errors import WeightsError
from realsys.train.megatron.device import prepare_device
from realsys.train.megatron.offload import OffloadedMemory


def test_memory_comes_back_from_its_file():
    tensor = torch.arange(1000.0)
    memory = OffloadedMemory(prepare_device(0, 1), [tensor.untyped_storage()], [])
    assert tensor.untyped_storage().nbytes() == 0
    memory.restore()
    assert torch.equal(tensor, torch.arange(1000.0))


def test_a_folder_without_room_is_named_and_nothing_is_released(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    tensor = torch.arange(1000.0)
    with pytest.raises(WeightsError, match="4000 bytes.*missing.*set TMPDIR"):
        OffloadedMemory(prepare_device(0, 1), [tensor.untyped_storage()], [])
    assert torch.equal(tensor, torch.arange(1000.0))


def test_a_file_that_was_cut_short_is_noticed():
    tensor = torch.arange(1000.0)
    memory = OffloadedMemory(prepare_device(0, 1), [tensor.untyped_storage()], [])
    [(_, file)] = memory._kept
    position = file.tell()
    file.truncate(100)
    file.seek(position)
    with pytest.raises(WeightsError, match="was cut short"):
        memory.restore()
