"""Checkpoints that could not be written, are damaged, or are of another model: refused, and the cause is named."""

import os
import resource
import threading

import pytest

from realsys.errors import CheckpointError
from realsys.train.checkpoint.saver import CheckpointWriter, load_checkpoint
from realsys.train.checkpoint.tensors import write_tensors
from tests.support.training.checkpoint_ranks import SINGLE, Setup, checkpoint, complete, make_models, train


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


def test_full_disk_is_named(models, tmp_path):
    """The next checkpoint can be written."""
    full, spare = tmp_path / "step-00000001.tmp", tmp_path / "step-00000002.tmp"
    full.mkdir()
    spare.mkdir()
    (full / "actor-00001-of-00001.safetensors").symlink_to("/dev/full")

    def body(role):
        train(role, range(1))
        writer = CheckpointWriter(role)
        writer.begin(full, 1)
        with pytest.raises(CheckpointError) as caught:
            writer.finish()
        writer.begin(spare, 2)
        writer.finish()
        return str(caught.value)

    (message,) = Setup().run(body, models["untied"])
    path = full / "actor-00001-of-00001.safetensors"
    assert message == f"checkpoint {path}: cannot be written: No space left on device"
    assert (full / "actor-00001-of-00001.failed").exists() and not (full / "actor-00001-of-00001.json").exists()
    assert complete(spare, SINGLE, 2).exists()


def test_a_file_size_limit_is_named(models, tmp_path):
    tmp = tmp_path / "step-00000001.tmp"
    tmp.mkdir()

    def body(role):
        train(role, range(1))
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, unlimited[1]))
        writer = CheckpointWriter(role)
        writer.begin(tmp, 1)
        with pytest.raises(CheckpointError) as caught:
            writer.finish()
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        return str(caught.value)

    (message,) = Setup().run(body, models["untied"])
    assert message.endswith("cannot be written: File too large")


def test_hanging_disk_is_named_in_time(models, tmp_path):
    tmp = tmp_path / "step-00000001.tmp"
    tmp.mkdir()

    def body(role):
        train(role, range(1))
        hangs = threading.Event()

        def write(path, snapshots):
            hangs.wait()
            return write_tensors(path, snapshots)

        writer = CheckpointWriter(role, write, timeout_s=0.05)
        writer.begin(tmp, 1)
        with pytest.raises(CheckpointError) as caught:
            writer.finish()
        hangs.set()
        return str(caught.value)

    (message,) = Setup().run(body, models["untied"])
    assert message.startswith(f"checkpoint {tmp / 'actor-00001-of-00001.safetensors'}: not on disk after 0.05 s more")


@pytest.fixture(scope="module")
def written(models, tmp_path_factory):
    return checkpoint(Setup(), models["untied"], tmp_path_factory.mktemp("written"))[0]


def refusal(directory, model, setup=None):
    def body(role):
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(role, directory)
        return str(caught.value)

    return str((setup or Setup()).run(body, model)[0])


def copied(directory, target):
    target.mkdir()
    for file in directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_other_model_is_refused_with_its_size(models, written):
    expected = f"checkpoint {written}: actor is of another model: hidden_size 32, this role's has 64"
    assert refusal(written, models["wider"]) == expected
    assert "tied_embeddings 0, this role's has 1" in refusal(written, models["tied"])


def test_damage_is_refused_and_the_file_named(models, written, tmp_path):
    data = "actor-00001-of-00001.safetensors"
    for number, (name, position) in enumerate([(data, -5), (data, 20000), ("actor-00001-of-00001.json", 40)]):
        directory = copied(written, tmp_path / f"step-{number:08d}")
        content = bytearray((directory / name).read_bytes())
        content[position] ^= 1
        (directory / name).write_bytes(content)
        message = refusal(directory, models["untied"])
        assert message.startswith(f"{directory / name} is corrupt: ") and "\n" not in message


def test_a_truncated_file_is_refused_and_named(models, written, tmp_path):
    directory = copied(written, tmp_path / "step-00000003")
    path = directory / "actor-00001-of-00001.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    message = refusal(directory, models["untied"])
    assert (
        message
        == f"{path} has {size - 1} bytes, its writer says {size}: truncated or overwritten; use an older checkpoint"
    )
    path.unlink()
    assert refusal(directory, models["untied"]).startswith(f"{path} cannot be read: No such file")


def test_a_checkpoint_that_was_never_completed_is_refused(models, written, tmp_path):
    tmp = copied(written, tmp_path / "step-00000003.tmp")  # killed before the rename
    assert "was never completed" in refusal(tmp, models["untied"])
    half = copied(written, tmp_path / "step-00000003")
    (half / "state.json").unlink()
    assert "was never completed" in refusal(half, models["untied"])
