"""Records of steps on disk: they are read back bit by bit, and damage is named."""

import dataclasses
import math
import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash

from realsys.cluster.commit_folder import Removed
from realsys.cluster.files import FileInfo
from realsys.errors import RecordError
from realsys.train import record_files as files
from realsys.train import recording
from realsys.train.master.replay import compare
from realsys.train.megatron.device import Device
from realsys.train.record_files import RowReader, StepRecord
from realsys.train.recording import SampleRecorder
from realsys.train.requests import RecordRequest
from realsys.train.worker.data_manager import DataManager
from realsys.types import GroupOrigin, RowOrigin, SampleMeta, Ticket

ORIGIN = GroupOrigin(
    Ticket("00000007", 1, 12, seed=99, version=2),
    "rollout_worker/0",
    1.0,
    2.5,
    {"generate_s": 1.25},
    [
        [RowOrigin("stop", (("generation_server/0", 2), ("generation_server/1", 1)), ((3, 0.5),))],
        [RowOrigin("length"), RowOrigin("stop")],
    ],
    ["episode 2: the tool hung"],
)


def arrays():
    return {
        ("00000007/0", "tokens"): np.array([5, 6, 7, 8], np.int32),
        ("00000007/1", "tokens"): np.array([5, 9], np.int32),
        ("00000007/0", "loss_mask"): np.array([False, True, True, True]),
        ("00000007/0", "behav_logprobs"): np.array([-0.5, -0.25, -1.0], np.float32),
        ("00000007/1", "behav_logprobs"): np.zeros(1, np.float32),
        ("00000007/1", "values"): np.zeros(0, np.float32),  # an empty array is one, too
    }


def record(step=3, **changes):
    groups = [
        [
            SampleMeta(f"00000007/{k}", "00000007", 1, 4, 3, 5.0, False, 1, 2, 0, episode=k, correct=k == 0)
            for k in range(2)
        ]
    ]
    whole = StepRecord(
        step=step,
        version=step - 1,
        seed=1,
        incarnation="i",
        groups=groups,
        calls=["actor_train"],
        plan="p",
        args={"actor_train": {"lr": 0.1}},
        stats={"actor_train": {"loss": 0.1, "grad_norm": files.number(math.nan)}},
        scores={},
        weights={"actor": {0: {"layer.weight": "aa", "layer.bias": "bb"}}},
        time=1.0,
    )
    return msgspec.structs.replace(whole, **changes)


def write(root, step=3, held=None):
    """A complete record of one worker."""
    directory = root / f"step-{step:08d}"
    directory.mkdir(parents=True)
    content = files.encode_worker_file(0, step, arrays() if held is None else held, [ORIGIN])
    (directory / files.worker_file(0)).write_bytes(content)
    info = FileInfo(len(content), xxhash.xxh3_64_hexdigest(content))
    whole = msgspec.structs.replace(record(step), files={files.worker_file(0): info})
    (directory / files.BATCH).write_bytes(files.RECORD.encode(whole))
    return directory


def test_what_is_written_comes_back_bit_by_bit(tmp_path):
    directory = write(tmp_path)
    found = files.read_record(directory)
    assert msgspec.structs.replace(found, files={}) == record()
    assert found.stats["actor_train"]["grad_norm"] == "nan"
    back, origins = files.read_arrays(directory, found)
    assert origins == [ORIGIN]
    assert back.keys() == arrays().keys()
    for item, array in arrays().items():
        assert back[item].dtype == array.dtype
        np.testing.assert_array_equal(back[item], array)


def test_worker_without_arrays_has_a_file(tmp_path):
    """The file has the origins of its groups."""
    directory = write(tmp_path, held={})
    assert files.read_arrays(directory, files.read_record(directory)) == ({}, [ORIGIN])


def test_any_flipped_bit_of_a_file_is_noticed(tmp_path):
    directory = write(tmp_path)
    path, found = directory / files.worker_file(0), files.read_record(directory)
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(RecordError, match=r"worker-00000\.safetensors is corrupt") as caught:
            files.read_arrays(directory, found)
        assert caught.value.exit_code == 2


def test_damaged_array_is_named_with_its_sample(tmp_path):
    directory = write(tmp_path)
    path = directory / files.worker_file(0)
    whole, wanted = path.read_bytes(), np.array([-0.5, -0.25, -1.0], np.float32).tobytes()
    at = whole.index(wanted) + 5
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    with pytest.raises(
        RecordError,
        match="is corrupt: behav_logprobs of sample 00000007/0 is not what was written; choose another step",
    ):
        files.read_worker_file(directory, 0)


@pytest.mark.parametrize("name", [files.BATCH, files.worker_file(0)])
def test_a_torn_or_missing_file_is_named(tmp_path, name):
    directory = write(tmp_path)
    path = directory / name
    whole = path.read_bytes()

    def read():
        files.read_arrays(directory, files.read_record(directory))

    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(RecordError, match=f"{name} is corrupt") as caught:
            read()
        assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(
        RecordError, match="was never completed: it has no batch.json" if name == files.BATCH else "cannot be read"
    ):
        read()


def test_a_record_of_another_format_is_refused(tmp_path):
    directory = write(tmp_path)
    other = dataclasses.replace(files.RECORD, number=4)
    (directory / files.BATCH).write_bytes(other.encode(record()))
    with pytest.raises(RecordError, match=r"batch\.json has format 4, this realsys reads format 5: choose another"):
        files.read_record(directory)


def test_missing_step_is_refused_with_the_recorded_ones(tmp_path):
    for step in (3, 4, 5, 8):
        write(tmp_path, step)
    (tmp_path / "step-00000009.tmp").mkdir()  # under way
    (tmp_path / "step-00000010").mkdir()  # being removed
    with pytest.raises(RecordError, match="step 9 is not recorded; there is 3-5, 8") as caught:
        files.record_of_step(tmp_path, 9)
    assert caught.value.exit_code == 2
    assert files.record_of_step(tmp_path, 8).name == "step-00000008"
    with pytest.raises(RecordError, match="no record of any step"):
        files.record_of_step(tmp_path / "nowhere", 1)


def test_recovery_deletes_later_and_unfinished_records(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / "step-00000002.tmp").mkdir()
    (tmp_path / "step-00000001" / files.BATCH).unlink()
    removed = files.discard_after(tmp_path, 2)
    assert [Path(name).name for name in removed.gone] == ["step-00000001", "step-00000002.tmp", "step-00000003"]
    assert list(files.recorded_steps(tmp_path)) == [2]
    assert files.discard_after(tmp_path / "nowhere", 2) == Removed()


@pytest.mark.parametrize(
    ("keep", "oldest_checkpoint", "left"),
    [
        (2, None, [5, 6]),  # nothing can be replayed from a checkpoint
        (2, 3, [4, 5, 6]),  # all since the oldest checkpoint
        (4, 5, [3, 4, 5, 6]),
        (9, 6, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_pruning_keeps_newest_and_replayable_records(tmp_path, keep, oldest_checkpoint, left):
    """A record is replayable if a kept checkpoint is before it."""
    for step in range(1, 7):
        write(tmp_path, step)
    files.prune(tmp_path, keep, oldest_checkpoint)
    assert list(files.recorded_steps(tmp_path)) == left


# ---- a step compared with its replay


def test_a_step_is_equal_to_itself():
    found = compare(record(), record(), arrays(), arrays())
    assert found.equal and found.sequences == 2
    assert found.compared == {"plan": 1, "call": 1, "array": 6, "statistic": 2, "parameter": 2}
    assert not any(found.unequal.values())


def test_different_array_is_named_with_its_token():
    """One bit differs."""
    changed = arrays()
    changed["00000007/0", "behav_logprobs"] = np.array([-0.5, -0.25, np.nextafter(np.float32(-1), 0)], np.float32)
    found = compare(record(), record(), arrays(), changed)
    assert not found.equal and found.unequal["array"] == 1
    (first,) = found.first
    assert "array behav_logprobs of sample 00000007/0: recorded np.float32(-1.0) at token 2" in str(first)


def test_small_differences_are_differences():
    """Negative zero, a missing statistic, a changed parameter."""
    stats = {"actor_train": {"loss": 0.1, "zero": 0.0}}
    again = {"actor_train": {"loss": 0.1, "zero": -0.0}}
    (first,) = compare(record(stats=stats), record(stats=again), {}, {}).first
    assert str(first) == "statistic actor_train/zero: recorded 0.0, replayed -0.0"
    (first,) = compare(record(stats=stats), record(stats={}), {}, {}).first
    assert str(first) == "statistic actor_train/loss: recorded 0.1, replayed nothing"
    weights = {"actor": {0: {"layer.weight": "aa", "layer.bias": "cc"}}}
    found = compare(record(), record(weights=weights), {}, {})
    assert found.unequal["parameter"] == 1
    assert str(found.first[0]) == "parameter actor on model_worker/0: layer.bias: recorded bb, replayed cc"


def test_the_cause_comes_before_its_consequences():
    found = compare(record(), record(plan="q", stats={}, weights={}), arrays(), {})
    assert [difference.what for difference in found.first] == ["plan", "array", "statistic", "parameter"]


# ---- Single rows of a recorded step, without loading the step


def reader(directory):
    return RowReader(directory, files.read_record(directory))


def test_rows_are_read_bit_by_bit(tmp_path):
    found = reader(write(tmp_path))
    assert found.origins == {ORIGIN.ticket.ticket_id: ORIGIN}
    for (sample_id, key), array in arrays().items():
        back = found.array(sample_id, key)
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)
    assert found.arrays("00000007/1").keys() == {"tokens", "behav_logprobs", "values"}


def test_flipped_bit_is_named_with_its_sample(tmp_path):
    directory = write(tmp_path)
    path = directory / files.worker_file(0)
    whole, wanted = path.read_bytes(), np.array([-0.5, -0.25, -1.0], np.float32).tobytes()
    at = whole.index(wanted) + 5
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    found = reader(directory)
    assert found.array("00000007/0", "tokens").tolist() == [5, 6, 7, 8]
    with pytest.raises(RecordError, match="behav_logprobs of sample 00000007/0 is not what was written"):
        found.arrays("00000007/0")


def test_torn_file_is_named(tmp_path):
    directory = write(tmp_path)
    path = directory / files.worker_file(0)
    whole = path.read_bytes()
    for size in (0, 1, 9, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(RecordError, match=r"worker-00000\.safetensors is corrupt"):
            reader(directory)
    path.unlink()
    with pytest.raises(RecordError, match="cannot be read"):
        reader(directory)


def test_unknown_row_and_array_are_named(tmp_path):
    found = reader(write(tmp_path))
    with pytest.raises(RecordError, match="sample 'x' is not in this record"):
        found.arrays("x")
    with pytest.raises(RecordError, match="has no array 'advantages'"):
        found.array("00000007/0", "advantages")


# ---- Recording while the next step trains, on a disk that hangs; checksums of what is not published


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

    def __init__(self):
        self.name, self.settings = "critic", SimpleNamespace(offload="none")
        self.device = Device(torch.device("cpu"), "gloo")
        self.head, self.frozen = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(2), False)
        self.engine: Any = SimpleNamespace(module=self)

    def named_parameters(self):
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
