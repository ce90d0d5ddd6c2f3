"""A rank's copy of a version: it does not change while training continues, and is read by one thread at a time."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import xxhash

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import WeightsError
from realsys.train.megatron.device import Device
from realsys.train.requests import CopyWeightsRequest, DigestWeightsRequest, SaveWeightsRequest
from realsys.train.step_gate import StepGate
from realsys.train.worker.call_service import ModelWorkerService, WorkerParts
from realsys.train.worker.data_manager import DataManager
from realsys.train.worker.weight_saver import WeightSaver
from realsys.weights.contract import PublisherParts
from realsys.weights.disk.stage import HeldWeights, stage
from realsys.weights.disk.transport import DiskPublisher
from realsys.weights.disk.writer import DiskWriter, ShardWriter
from realsys.weights.low_rank import factors_of

CPU = Device(torch.device("cpu"), "gloo")
BOUND_S = 60.0


class Writer:
    """Remembers the versions that it was given. ``hold``: it returns only when this is set."""

    def __init__(self):
        self.began = threading.Event()
        self.hold = threading.Event()
        self.hold.set()
        self.wrote: list[tuple[int, list[float], dict[str, str]]] = []

    def write(self, share, tensors):
        self.began.set()
        assert self.hold.wait(BOUND_S)
        self.wrote.append((share.version, tensors["w"].flatten().tolist(), dict(share.checksums)))
        return f"report of rank {share.rank} of {share.ranks}"


class Actor:
    """A role with one parameter, which training changes in place."""

    def __init__(self):
        self.name, self.device = "actor", CPU
        self.parameter = torch.nn.Parameter(torch.zeros(2, 3))
        layout = SimpleNamespace(world_size=4)
        self.groups = SimpleNamespace(rank=1, mesh=SimpleNamespace(layout=layout))
        self.engine: Any = self
        self.settings = SimpleNamespace(head="lm", lora=SimpleNamespace(rank=0))
        self.is_offloaded = False

    def export(self):
        yield "w", self.parameter.t()  # an export may be a view, and not contiguous

    def onload(self): ...

    def offload(self): ...

    def train(self, value):
        with torch.no_grad():
            self.parameter.fill_(value)


def copy(saver, actor, version):
    actor.train(float(version))
    saver.copy(actor, CopyWeightsRequest("actor", version))


def save(saver, version):
    return saver.save(SaveWeightsRequest("actor", version, {}))


def test_later_training_does_not_change_the_copy():
    """A version is written, and written again, as it was when it was copied."""
    writer, actor = Writer(), Actor()
    saver = WeightSaver(3, writer, BOUND_S)
    copy(saver, actor, 1)
    actor.train(9.0)
    replies = [save(saver, 1), save(saver, 1)]
    checksums = {"w": xxhash.xxh3_64_hexdigest(torch.full((3, 2), 1.0).numpy().tobytes())}
    assert writer.wrote == [(1, [1.0] * 6, checksums)] * 2
    assert [(r.report, r.worker, r.checksums) for r in replies] == [("report of rank 1 of 4", 3, checksums)] * 2
    assert saver.digest(DigestWeightsRequest("actor", 1)).checksums == checksums


def test_tensor_is_hashed_once_for_all(tmp_path, monkeypatch):
    """The manifest, a repair and the record of the step have the checksum from one pass over the tensor's bytes."""
    hashed, digest = list[int](), xxhash.xxh3_64_hexdigest

    def counted(data):
        hashed.append(memoryview(data).nbytes)
        return str(digest(data))

    monkeypatch.setattr(xxhash, "xxh3_64_hexdigest", counted)
    saver, actor = WeightSaver(0, DiskWriter(ShardWriter()), BOUND_S), Actor()
    for version in range(2):
        plan = {"directory": str(tmp_path / f"v{version:08d}.t.tmp")}
        Path(plan["directory"]).mkdir()
        copy(saver, actor, version)
        replies = [saver.save(SaveWeightsRequest("actor", version, plan)) for _ in range(2)]
        saver.digest(DigestWeightsRequest("actor", version))
        [shard] = replies[0].report
        assert shard.tensors["w"].checksum == replies[0].checksums["w"]
    assert hashed == [24] * 2


def test_memory_of_copy_is_used_again():
    saver, actor = WeightSaver(0, Writer(), BOUND_S), Actor()
    copy(saver, actor, 1)
    before = saver._copies["actor"].tensors["w"].data_ptr()
    copy(saver, actor, 2)
    assert saver._copies["actor"].tensors["w"].data_ptr() == before


class AdaptedActor(Actor):
    """A role whose parameter is frozen, with an adapter that training changes. ``exported``: what was asked for."""

    def __init__(self):
        super().__init__()
        self.settings.lora = SimpleNamespace(rank=1, alpha=2.0)
        self.b = torch.zeros(3, 1)
        self.exported: list[str] = []

    def export(self, what="served"):
        self.exported.append(what)
        yield "w", factors_of(torch.ones(1, 2), self.b) if what == "adapters" else self.parameter.t()

    def train(self, value):
        self.b.fill_(value)


def test_frozen_tensors_are_copied_once():
    """With an adapter a version is its copy; the frozen tensors come with the first one, or after a checkpoint."""
    writer, actor = Writer(), AdaptedActor()
    saver = WeightSaver(0, writer, BOUND_S)
    for version in (1, 2):
        copy(saver, actor, version)
        actor.train(9.0)
        save(saver, version)
    assert [values for _, values, _ in writer.wrote] == [[2.0] * 6, [4.0] * 6]
    assert actor.exported == ["adapters", "frozen", "adapters"]
    actor.parameter.data.fill_(1.0)
    saver.forget_frozen("actor")
    copy(saver, actor, 3)
    save(saver, 3)
    checksums = {"w": xxhash.xxh3_64_hexdigest(torch.full((3, 2), 7.0).numpy().tobytes())}
    assert writer.wrote[-1] == (3, [7.0] * 6, checksums)


def test_delta_is_from_the_version_before(tmp_path):
    """The memory of the version before holds the new one when it is written."""
    publisher = DiskPublisher(PublisherParts(tmp_path / "weights", tmp_path, "1"), keep=9)
    writer = DiskWriter(ShardWriter(deltas=True, full_every=9))
    saver, actor, base = WeightSaver(0, writer, BOUND_S), Actor(), ""
    actor.parameter = torch.nn.Parameter(torch.randn(64, 64).bfloat16())
    held = HeldWeights(everything=True)
    for version in range(3):
        with torch.no_grad():
            actor.parameter[version].mul_(2)
        expected = actor.parameter.detach().t().clone()
        saver.copy(actor, CopyWeightsRequest("actor", version))  # type: ignore[arg-type]
        plan = publisher.prepare(version, base)
        reply = saver.save(SaveWeightsRequest("actor", version, msgspec.to_builtins(plan)))
        base = publisher.commit(version, version, plan, [msgspec.to_builtins(reply.report)]).locator
        staged = stage(Path(base), version, held)
        assert torch.equal(staged.tensors["w"], expected) and staged.counts["changed"] == min(version, 1)


def test_overwritten_version_cannot_be_saved():
    saver, actor = WeightSaver(0, Writer(), BOUND_S), Actor()
    with pytest.raises(WeightsError, match="has a copy of no version of role 'actor', not of version 1"):
        save(saver, 1)
    copy(saver, actor, 1)
    copy(saver, actor, 2)
    with pytest.raises(WeightsError, match="has a copy of version 2 of role 'actor', not of version 1"):
        save(saver, 1)


def test_copy_waits_for_the_write_before():
    writer, actor = Writer(), Actor()
    saver = WeightSaver(0, writer, BOUND_S)
    copy(saver, actor, 1)
    writer.hold.clear()
    writing = threading.Thread(target=save, args=(saver, 1), daemon=True)
    writing.start()
    assert writer.began.wait(BOUND_S)
    copying = threading.Thread(target=copy, args=(saver, actor, 2), daemon=True)
    copying.start()
    writer.hold.set()
    for thread in (writing, copying):
        thread.join(BOUND_S)
    save(saver, 2)
    assert [(version, values[0]) for version, values, _ in writer.wrote] == [(1, 1.0), (2, 2.0)]


def test_hanging_write_is_named_by_the_next_copy():
    writer, actor = Writer(), Actor()
    saver = WeightSaver(3, writer, 0.01)
    copy(saver, actor, 1)
    writer.hold.clear()
    writing = threading.Thread(target=save, args=(saver, 1), daemon=True)
    writing.start()
    assert writer.began.wait(BOUND_S)
    with pytest.raises(WeightsError, match="model_worker/3: the version before 2 is not written after 0.01 s"):
        copy(saver, actor, 2)
    writer.hold.set()
    writing.join(BOUND_S)


class Stream:
    """An endpoint whose master asks for a version that was never copied, and says nothing else."""

    def __init__(self):
        self.background: set[str] = set()
        self.errors: list[str] = []
        self._ended = threading.Event()

    def serve_in_background(self, *handlers):
        self.background |= set(handlers)

    def next_request(self, timeout_s):
        assert self._ended.wait(BOUND_S)

    def next_background(self, timeout_s):
        return SimpleNamespace(handler="save_weights", decode=lambda kind: SaveWeightsRequest("actor", 7, {}))

    def reply_error(self, request, error):
        self.errors.append(str(error))
        self._ended.set()


def test_failed_write_ends_the_worker(tmp_path):
    """The master gets the reason first, as for every request."""
    stream: Any = Stream()
    parts = WorkerParts(0, {}, stream, DataManager(0), CPU, Writer(), StepGate())
    service = ModelWorkerService(Config(), TrialPaths(tmp_path), parts)
    with pytest.raises(WeightsError, match="not of version 7"):
        service.run(threading.Event())
    assert len(stream.errors) == 1 and stream.background == {"save_weights", "digest_weights"}
