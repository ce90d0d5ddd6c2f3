"""Versions of real ranks with adapters: what a server merges has the bits of the trainer's own export."""

from contextlib import closing

import msgspec
import pytest
import torch

from realsys.config.allocation import ParallelLayout
from realsys.train.checkpoint.saver import load_checkpoint
from realsys.train.requests import CopyWeightsRequest, SaveWeightsRequest
from realsys.train.worker.weight_saver import WeightSaver
from realsys.weights.contract import PublisherParts
from realsys.weights.disk.manifest import load_manifest
from realsys.weights.disk.transport import DiskPublisher
from realsys.weights.disk.writer import DiskWriter, ShardWriter
from realsys.weights.host_copies import SharedCopies
from realsys.weights.host_reader import HostReader
from tests.support.training.checkpoint_ranks import BEFORE, Setup, checkpoint, make_models, train
from tests.support.training.train_ranks import cat_exports

VERSIONS = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


def published(setup, model, root, start=lambda role: None):
    """Publish a version before the first step and after each one; returns their folders and the ranks' exports."""
    publisher = DiskPublisher(PublisherParts(root / "weights", model, "0001"), keep=9)
    names = [str(root / "weights" / f"v{version:08d}.0001") for version in range(VERSIONS)]
    plans = [publisher.prepare(version, names[version - 1] if version else "") for version in range(VERSIONS)]

    def body(role):
        start(role)
        saver, found = WeightSaver(role.groups.rank, DiskWriter(ShardWriter()), 60.0), []
        for version, plan in enumerate(plans):
            if version:
                train(role, range(version, version + 1))
            saver.copy(role, CopyWeightsRequest("actor", version))
            export = {name: tensor.clone() for name, tensor in role.engine.export()}
            reply = saver.save(SaveWeightsRequest("actor", version, msgspec.to_builtins(plan)))
            found.append((msgspec.to_builtins(reply.report), export))
        return found

    ranks = setup.run(body, model)
    for version, plan in enumerate(plans):
        publisher.commit(version, version, plan, [rank[version][0] for rank in ranks])
    return names, [cat_exports([rank[version][1] for rank in ranks]) for version in range(VERSIONS)]


def check_served(names, exports, model, root):
    (root / "shm").mkdir()
    with closing(HostReader(SharedCopies(root, model, [root / "shm"]))) as reader:
        for version, (name, expected) in enumerate(zip(names, exports, strict=True)):
            staged = reader.stage(name, version)
            assert staged.tensors.keys() == expected.keys()
            assert [key for key in expected if not torch.equal(staged.tensors[key], expected[key])] == []
            reader.release()
        assert staged.counts["changed"] == sum(key.endswith("_proj.weight") for key in expected)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(lora=2),
        Setup(ParallelLayout(data=2), lora=2, dtype="bfloat16", distributed=True),
        Setup(ParallelLayout(tensor=2), lora=2, dtype="bfloat16"),
        Setup(ParallelLayout(pipeline=2), lora=2, model="tied"),
        Setup(ParallelLayout(pipeline=2, tensor=2), lora=3, dtype="bfloat16"),
        Setup(ParallelLayout(tensor=4), lora=2),  # more ranks than key-value heads
    ],
    ids=str,
)
def test_server_merges_the_bits_that_are_trained(setup, models, tmp_path):
    names, exports = published(setup, models[setup.model], tmp_path)
    assert not load_manifest(tmp_path / names[0]).needs
    assert {tuple(load_manifest(tmp_path / name).needs) for name in names[1:]} == {("v00000000.0001",)}
    different = [key for key in exports[1] if not torch.equal(exports[1][key], exports[2][key])]
    assert different
    check_served(names, exports, models[setup.model], tmp_path)


def test_resumed_trainer_publishes_the_frozen_weights_first(models, tmp_path):
    setup = Setup(ParallelLayout(tensor=2), lora=2, dtype="bfloat16")
    directory, _ = checkpoint(setup, models["untied"], tmp_path / "checkpoints")
    names, exports = published(setup, models["untied"], tmp_path, lambda role: load_checkpoint(role, directory))
    first = load_manifest(tmp_path / names[0])
    assert BEFORE and not first.needs and any(info.pieces[-1].rank for info in first.tensors.values())
    assert load_manifest(tmp_path / names[2]).needs == ["v00000000.0001"]
    check_served(names, exports, models["untied"], tmp_path)
