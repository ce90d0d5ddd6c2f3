"""Publication next to damaged versions, and next to folders that cannot be removed."""

import asyncio
import json
import logging
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file

from realsys.errors import Fenced, NameStoreError, WeightsError
from realsys.train.master import publish
from realsys.train.master.publish import Publisher, VersionKey, set_key
from realsys.train.requests import SaveWeightsReply
from realsys.weights.contract import PublisherParts, Share
from realsys.weights.disk import manifest as m
from realsys.weights.disk import transport
from realsys.weights.disk.manifest import DiskPlan
from realsys.weights.disk.stage import stage
from realsys.weights.disk.transport import DiskPublisher
from realsys.weights.disk.writer import DiskWriter, ShardWriter
from tests.support.ledger.memory_store import MemoryNameStore
from tests.support.streams.weight_ranks import WeightRanks


class Trial:
    """Publishes versions of which each changes one tensor of two, and so refers to the one before."""

    def __init__(self, tmp_path, *, keep=2, incarnation="0001", served=True):
        self.root, model, self._incarnation = tmp_path / "weights", tmp_path / "model", incarnation
        model.mkdir(exist_ok=True)
        self._writer, self._store = DiskWriter(ShardWriter()), MemoryNameStore()
        weights = DiskPublisher(PublisherParts(self.root, model, incarnation), keep)
        key = VersionKey(self._store, "model_version")
        self.ranks = WeightRanks(self._save)
        self.publisher = Publisher(weights, self.ranks, key, incarnation=incarnation, served=served)

    def tensors(self, version):
        return {"frozen": torch.arange(64.0), "trained": torch.full((64,), float(version))}

    async def _save(self, request):
        share = Share(request.role, request.version, 0, 1, request.plan)
        return [SaveWeightsReply(self._writer.write(share, self.tensors(request.version)))]

    def publish(self, version):
        asyncio.run(self.publisher.publish(version, version))
        self.publisher.keep([version])  # every server has it
        return self.folder(version)

    def folder(self, version):
        return self.root / m.directory_name(version, self._incarnation)

    def versions(self):
        return [version for version, _, _ in m.complete_versions(self.root)]

    def published(self):
        return json.loads(self._store.get("model_version"))["version"]

    def check(self, version):
        staged = stage(self.folder(version), version).tensors
        assert all(torch.equal(staged[name], tensor) for name, tensor in self.tensors(version).items())

    def close(self):
        self._store.close()


@pytest.fixture
def trial(tmp_path):
    made = Trial(tmp_path)
    yield made
    made.close()


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def renamed(path):
    """A flipped bit in the name of a folder that is referred to."""
    text = path.read_text()
    assert '"v00000000.0001"' in text
    path.write_text(text.replace('"v00000000.0001"', '"v00000004.0001"'))


def errors(caplog, folder):
    return [r.message for r in caplog.records if r.levelno >= logging.ERROR and str(folder) in r.message]


@pytest.mark.parametrize(
    "damage", [half, renamed, lambda path: path.write_bytes(b"")], ids=["half", "renamed", "empty"]
)
def test_version_after_a_damaged_one_is_whole(trial, damage, caplog, monkeypatch):
    """The damage happens during the publication, and does not end the run."""
    trial.publish(0)
    prune = m.prune

    def damaged_before(root, **options):
        if trial.versions()[-1] == 1:
            damage(trial.folder(1) / m.MANIFEST)
        return prune(root, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(m, "prune", damaged_before)
    trial.publish(1)
    assert trial.versions() == [0, 1], "what it may refer to stays"
    trial.publish(2)
    assert m.load_manifest(trial.folder(2)).needs == []
    trial.check(2)
    assert trial.versions() == [0, 1, 2]
    trial.publish(3)
    assert trial.versions() == [2, 3], "once it goes, all goes that stayed for it"
    assert m.load_manifest(trial.folder(3)).needs == ["v00000002.0001"]
    trial.check(3)
    named = errors(caplog, trial.folder(1))
    assert len(named) == 2, "that nobody knows what it refers to, and that the next version is written whole"
    assert sum("is written whole" in message for message in named) == 1


def test_damaged_reference_is_not_used_again(trial):
    trial.publish(0)
    trial.publish(1)
    half(trial.folder(0) / m.MANIFEST)
    trial.publish(2)
    assert m.load_manifest(trial.folder(2)).needs == []
    trial.check(1)
    trial.check(2)


def test_missing_shard_is_not_referred_to(trial):
    trial.publish(0)
    for shard in trial.folder(0).glob("*.safetensors"):
        shard.unlink()
    trial.publish(1)
    trial.check(1)


def test_version_that_cannot_be_removed_is_logged(trial, caplog, monkeypatch):
    """A network file system refuses to remove a folder while a server has a file open."""
    remove = shutil.rmtree

    def busy(path, **options):
        if Path(path) == trial.folder(0):
            raise OSError(39, "Directory not empty", str(path))
        remove(path, **options)  # type: ignore[arg-type]

    trial.publisher = _whole(trial)
    monkeypatch.setattr(shutil, "rmtree", busy)
    for version in range(4):
        trial.publish(version)
    assert trial.versions() == [2, 3] and trial.folder(0).exists()
    assert len(errors(caplog, trial.folder(0))) == 1 and "Directory not empty" in errors(caplog, trial.folder(0))[0]
    monkeypatch.undo()
    asyncio.run(trial.publisher.discard_unfinished())
    assert not trial.folder(0).exists()


class Away(MemoryNameStore):
    """Does not answer the first ``failures`` times."""

    def __init__(self, failures):
        super().__init__()
        self.failures = failures

    def add(self, key, value, *, lease=None, replace=False):
        if self.failures:
            self.failures -= 1
            raise NameStoreError("name store: did not answer")
        super().add(key, value, lease=lease, replace=replace)


def test_unreachable_name_store_is_tried_again(monkeypatch):
    """Its own leases last longer than that; one that stays away fences every process anyway."""
    monkeypatch.setattr(publish, "RETRY_S", 0.0)
    with closing(Away(3)) as store:
        asyncio.run(set_key(store, "status", "1", 60.0))
        assert store.get("status") == "1"
    with closing(Away(10**9)) as store, pytest.raises(NameStoreError, match="did not answer"):
        asyncio.run(set_key(store, "status", "1", 0.0))
    lease = iter([True, True, False])

    def check():
        if not next(lease):
            raise Fenced("its lease is over")

    with closing(Away(10**9)) as store, pytest.raises(Fenced):
        asyncio.run(set_key(store, "status", "1", 60.0, check))


@pytest.mark.parametrize("file", [m.MANIFEST, "*.part"])
def test_version_damaged_before_publication_is_written_again(trial, file, caplog, monkeypatch):
    def failpoint(point, path=None, **_):
        if point == "weights.publish" and path == trial.folder(1):
            half(next(path.glob(file)))  # version 1 refers to version 0, so its shard is a part

    monkeypatch.setattr(publish, "failpoint", failpoint)
    trial.publish(0)
    trial.publish(1)
    trial.check(1)
    assert "is written again" in errors(caplog, trial.folder(1))[0]
    assert sorted(trial.root.iterdir()) == [trial.folder(0), trial.folder(1)], "nothing is left of the other"
    trial.publish(2)
    trial.check(2)


def flipped(path):
    content = bytearray(path.read_bytes())
    content[-10] ^= 4
    path.write_bytes(content)


def said(version, *served):
    """The manager's status: versions that the servers have; None: it failed to load the newest."""
    rows = [{"failures": int(v is None), "version": v} for v in served]
    return {"version": version, "servers": rows}


def test_version_that_no_server_loads_is_rewritten(trial, caplog):
    """Without a server no batch arrives, so no later version would replace it."""
    trial.publish(0)
    flipped(next(trial.folder(0).glob("*.safetensors")))
    for status in (said(0), said(0, 0), said(0, None, 0), said(3, None)):
        asyncio.run(trial.publisher.repair(status))
        with pytest.raises(WeightsError, match="corrupt"):
            trial.check(0)
    asyncio.run(trial.publisher.repair(said(0, None, None)))
    trial.check(0)
    assert len(errors(caplog, trial.folder(0))) == 1 and "corrupt" in errors(caplog, trial.folder(0))[0]
    trial.publish(1)
    trial.check(1)


def test_repair_verifies_once_and_gives_up_finally(trial, monkeypatch):
    """A good version is verified once; one that stays damaged ends the run."""
    proved: list[int] = []

    def verify(folder, version, shards):
        proved.append(version)
        if version == 1:
            raise WeightsError("the disk lies")

    monkeypatch.setattr(transport, "verify", verify)
    for version in (0, 1):
        trial.publish(version)
        for _ in range(publish.MAX_REPAIRS):
            asyncio.run(trial.publisher.repair(said(version, None)))
    assert proved == [0] + [1] * publish.MAX_REPAIRS
    with pytest.raises(WeightsError, match="was written 4 times, and is damaged: the disk lies"):
        asyncio.run(trial.publisher.repair(said(1, None)))


def test_a_damaged_version_is_exported_all_the_same(trial, tmp_path):
    trial.publish(0)
    flipped(next(trial.folder(0).glob("*.safetensors")))
    asyncio.run(trial.publisher.export(tmp_path / "hf" / "step-0"))
    found = load_file(tmp_path / "hf" / "step-0" / "model-00001-of-00001.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in trial.tensors(0).items())
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        asyncio.run(trial.publisher.export(tmp_path / "file" / "hf"))


def _whole(trial):
    """One whose versions refer to nothing."""
    made = trial.publisher

    async def save(request):
        share = Share(request.role, request.version, 0, 1, DiskPlan(request.plan.directory))
        return [SaveWeightsReply(DiskWriter(ShardWriter()).write(share, trial.tensors(request.version)))]

    made._workers = WeightRanks(save)
    return made


def test_pinned_version_outlives_its_trainer(trial, tmp_path, caplog):
    """A trainer that follows keeps its files and those that it refers to, and names one that is gone."""
    for version in range(3):
        trial.publish(version)
    held = trial.publisher.newest
    after = Trial(tmp_path, incarnation="0002")
    asyncio.run(after.publisher.keep_pinned({"old": held, "lost": structs.replace(held, locator="/gone")}))
    assert "pinned as lost" in caplog.text and "pinned as old" not in caplog.text
    for version in range(6):
        after.publisher._in_use.keep([version], [held])
        asyncio.run(after.publisher.publish(version, version))
    trial.check(2)
    after.publisher.keep([5])
    asyncio.run(after.publisher.publish(6, 6))
    assert not trial.folder(2).exists()
    after.close()


def test_version_that_no_server_loads_is_written_for_an_export(tmp_path):
    """The versions count all the same; the ranks copy nothing for those that are not written."""
    trial = Trial(tmp_path, served=False)
    for version in (0, 1, 2):
        trial.publish(version)
    assert trial.versions() == [] and trial.ranks.copied == [] and trial.published() == 2
    for name in ("a", "b"):
        asyncio.run(trial.publisher.export(tmp_path / name))
    assert trial.versions() == [2] and trial.ranks.copied == [2], "an export of the same version finds it"
    [file] = (tmp_path / "b").glob("*.safetensors")
    assert torch.equal(load_file(file)["trained"], torch.full((64,), 2.0))
    trial.publish(3)
    asyncio.run(trial.publisher.export(tmp_path / "c"))
    assert m.load_manifest(trial.folder(3)).needs == [] and trial.published() == 3
    trial.check(3)
    trial.close()


def test_record_gets_checksums_without_a_written_version(tmp_path):
    trial = Trial(tmp_path, served=False)
    taken = []

    async def publish():
        await trial.publisher.begin(1, 1, lambda version, replies: taken.append((version, replies[0].checksums)))
        await trial.publisher.finish()

    asyncio.run(publish())
    assert taken == [(1, {"weight": "1"})] and trial.versions() == []
    trial.close()
