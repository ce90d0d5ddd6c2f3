"""A plain Hugging Face directory as a weight version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from realsys.errors import ModelError, WeightsError
from realsys.weights.disk.manifest import complete_versions
from realsys.weights.disk.plain_folders import adopt, materialise, verify
from realsys.weights.host_copies import SharedCopies
from realsys.weights.host_reader import HostReader


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An HF directory with two files of weights."""
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}}'
    )
    save_file({"a": torch.arange(6.0).bfloat16(), "b": torch.ones(2, 3)}, folder / "model-1.safetensors")
    save_file({"c": torch.full((5,), 7.0)}, folder / "model-2.safetensors")
    return folder


def test_servers_read_the_adopted_weights(model, tmp_path):
    folder = adopt(model, tmp_path / "weights", 60, "0001")
    reader = HostReader(SharedCopies(tmp_path, model, [tmp_path], 10.0))
    staged = reader.stage(str(folder), 60)
    assert torch.equal(staged.tensors["a"], torch.arange(6.0).bfloat16())
    assert torch.equal(staged.tensors["b"], torch.ones(2, 3))
    assert torch.equal(staged.tensors["c"], torch.full((5,), 7.0))
    reader.close()


def test_adopted_version_can_be_exported(model, tmp_path):
    folder = adopt(model, tmp_path / "weights", 0, "0001")
    materialise(folder, tmp_path / "export", 0)
    verify(tmp_path / "export", 0)
    assert not any(path.is_symlink() for path in (tmp_path / "export").iterdir())


def test_changed_model_is_refused_afterwards(model, tmp_path):
    """The folder may be overwritten while it is evaluated: no server loads what was not hashed at the start."""
    folder = adopt(model, tmp_path / "weights", 0, "0001")
    save_file({"c": torch.full((5,), 8.0)}, model / "model-2.safetensors")
    with pytest.raises(WeightsError, match=r"tensor c have checksum .* corrupt"):
        verify(folder, 0)


def test_model_stays_unchanged_by_adoption(model, tmp_path):
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in model.iterdir()}
    adopt(model, tmp_path / "weights", 0, "0001")
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in model.iterdir()} == before


def test_truncated_weights_are_never_a_version(model, tmp_path):
    file = model / "model-2.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelError, match=r"its header says .* download it again"):
        adopt(model, tmp_path / "weights", 0, "0001")
    assert complete_versions(tmp_path / "weights") == []
