"""Recording while the next step trains, on a disk that hangs; checksums of what is not published."""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import torch
import xxhash

from realsys.train import recording
from realsys.train.megatron.device import Device
from realsys.train.recording import SampleRecorder
from realsys.train.requests import RecordRequest
from realsys.train.worker.data_manager import DataManager

BOUND_S = 60


def test_hanging_disk_costs_a_record(tmp_path, monkeypatch):
    """The failure names the late record."""
    opened, told = threading.Event(), queue.SimpleQueue()

    def hang(*_):
        assert opened.wait(60)
        return b"late"

    monkeypatch.setattr(recording.files, "encode_worker_file", hang)
    monkeypatch.setattr(recording, "WRITE_S", 0.01)
    recorder = SampleRecorder(3, DataManager(3), {}, told.put)
    recorder._holds_any = True
    recorder.record(RecordRequest(1, str(tmp_path / "one")))
    recorder.record(RecordRequest(2, str(tmp_path / "two")))
    failed = told.get(timeout=60)
    assert (failed.step, failed.failure) == (2, "model_worker/3: record-1 is not on disk after 0.01 s")
    opened.set()
    assert told.get(timeout=60).step == 1 and not (tmp_path / "two").exists()


class Critic:
    """A role with a trained parameter and a frozen one."""

    def __init__(self) -> None:
        self.name, self.settings = "critic", SimpleNamespace(offload="none")
        self.device = Device(torch.device("cpu"), "gloo")
        self.head, self.frozen = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(2), False)
        self.engine: Any = SimpleNamespace(module=self)

    def named_parameters(self) -> Any:
        return [("head", self.head), ("frozen", self.frozen)]


def test_checksums_are_those_of_the_recorded_step(tmp_path, monkeypatch):
    """The next step changes the parameters before the thread reads the copies."""
    critic, told, trained = Critic(), queue.SimpleQueue(), threading.Event()
    compute = recording.checksums_of

    def later(tensors):
        assert trained.wait(BOUND_S)
        return compute(tensors)

    monkeypatch.setattr(recording, "checksums_of", later)
    recorder: Any = SampleRecorder(0, DataManager(0), {"critic": critic}, told.put)  # type: ignore[dict-item]
    expected = xxhash.xxh3_64_hexdigest(critic.head.detach().numpy().tobytes())
    recorder.record(RecordRequest(1, str(tmp_path / "one"), {0: ["critic"]}))
    with torch.no_grad():
        critic.head.mul_(3)
    trained.set()
    written = told.get(timeout=BOUND_S)
    assert written.weights == {"critic": {"head": expected}}
    assert written.checksum == "" and not (tmp_path / "one").exists(), "this worker has no arrays"


def test_worker_without_a_part_starts_no_thread(tmp_path):
    """It is on another data rank and holds no arrays, and the master expects no notice of it."""
    recorder = SampleRecorder(1, DataManager(1), {"critic": Critic()}, lambda _: None)  # type: ignore[dict-item]
    recorder.record(RecordRequest(1, str(tmp_path / "one"), {0: ["critic"]}))
    assert recorder._thread is None
