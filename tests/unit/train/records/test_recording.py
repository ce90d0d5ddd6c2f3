"""Recording while the next step trains, on a disk that hangs."""

import queue
import threading

from realsys.train.data_manager import DataManager
from realsys.train.records import recording
from realsys.train.records.record_messages import RecordRequest
from realsys.train.records.recording import SampleRecorder


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
