"""Fuzz targets: readers of files and of the name store."""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import xxhash

from realsys.cluster.commit_folder import FolderFormat
from realsys.cluster.lease import incarnation_in
from realsys.cluster.names.file_store import FileNameStore
from realsys.cluster.process import ErrorRecord, read_errors, record_of, write_error
from realsys.cluster.stream.security import KEY_FILE, CurveKeys, ensure_keys, load_keys
from realsys.config.paths import TrialPaths, read_config
from realsys.config.schema import Config
from realsys.data.lines import Demonstration, LineReader, Preference, Problem
from realsys.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LedgerError,
    NameStoreError,
    RecordError,
    StreamError,
    WeightsError,
)
from realsys.launch.commands.audit import audit_trial
from realsys.manager.decisions import ManagerSettings, ManagerState
from realsys.manager.ledger.events import Event
from realsys.manager.ledger.journal import Journal, read_journal
from realsys.manager.ledger.tickets import ticket_name
from realsys.manager.process import decode_value
from realsys.manager.routing import rollout_workers as workers
from realsys.observe.screen.progress import TrialProgress
from realsys.observe.step_log import read_steps
from realsys.train import record_files as record
from realsys.train.checkpoint import checkpoint_files as checkpoint
from realsys.types import PublishedVersion, ServerAddress
from realsys.weights.disk import delta, manifest
from realsys.weights.disk.manifest import ShardInfo, StoredPiece, TensorInfo
from realsys.weights.disk.plain_folders import write_safetensors
from realsys.weights.disk.reader import VersionReader
from tests.support.fuzz.mutations import Spoiler, example, examples
from tests.support.fuzz.targets import Target

Make = Callable[[Spoiler], bytes]


def name_store(folder: Path) -> Iterator[Target]:
    """Values that processes find under each other's keys, and the files of the file backend."""
    beat = {"kind": "rollout_worker", "index": 0, "host": "h", "pid": 1, "incarnation": "0" * 18 + "1"}
    beat |= {"state": "serving", "time": 1.5, "counters": {"malformed": 2}}

    def heartbeats(spoiler: Spoiler) -> str:
        return spoiler.spoil(spoiler.encode(beat)).decode("utf-8", "surrogateescape")

    def observe(value: str) -> None:
        table = workers.observe({"rollout_worker/0": value}, {}, 1.0)
        msgspec.json.encode(table["rollout_worker/0"].counters)

    yield Target("name store: heartbeat, manager", heartbeats, observe, ())
    yield Target("name store: heartbeat, worker", heartbeats, incarnation_in, (ValueError,))
    for kind in (PublishedVersion, ServerAddress):
        yield Target(
            f"name store: {kind.__name__}",
            examples(kind),
            lambda data, kind=kind: decode_value("key", data.decode("utf-8", "surrogateescape"), kind),
            (ValueError,),
        )
    yield Target(
        "name store: status",
        spoilt(msgspec.json.encode({"phase": "train", "time": 1.5, "step": 3, "losses": [0.1]})),
        lambda data: decode_value("key", data.decode("utf-8", "surrogateescape"), dict[str, object]),
        (ValueError,),
    )
    store = FileNameStore(folder / "store")
    lease = store.lease(1e6)
    store.add("a/b", "value", lease=lease)
    (value_file,) = (folder / "store" / "keys").rglob("*@value")
    (lease_file,) = (folder / "store" / "leases").iterdir()
    for path in (value_file, lease_file):
        yield Target(
            f"name store: {'value' if path is value_file else 'lease'} file",
            spoilt(path.read_bytes()),
            through(path, lambda: store.get("a/b")),
            (NameStoreError,),
        )


def spoilt(valid: bytes) -> Make:
    """Make inputs from one valid content: as JSON if it is JSON, else as bytes."""

    def make(spoiler: Spoiler) -> bytes:
        try:
            return spoiler.spoil(valid)
        except msgspec.DecodeError:
            return spoiler.spoil_bytes(valid)

    return make


def through(path: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
    """``read`` with the input in ``path``."""
    valid, mode = path.read_bytes(), path.stat().st_mode

    def decode(data: bytes) -> object:
        path.write_bytes(data)
        path.chmod(mode)
        try:
            return read()
        finally:
            path.write_bytes(valid)

    return decode


def journal(folder: Path) -> Iterator[Target]:
    """Lines of the ledger: torn, damaged, or with a right checksum and events that make no sense."""
    paths = TrialPaths(folder)
    path = paths.ledger
    path.touch()

    def lines(spoiler: Spoiler) -> bytes:
        records, before = [], 0
        for _ in range(spoiler.rng.randrange(1, 5)):
            value = example(Event, spoiler.rng)
            if value["type"] == "snapshot" and spoiler.rng.random() < 0.8:
                value |= _columns(value, spoiler.rng)
            body = spoiler.encode(value)
            if spoiler.rng.random() < 0.5:
                body = spoiler.spoil(body).replace(b"\n", b" ")
            records.append(b"%08x %b\n" % (zlib.crc32(body, before), body))
            before = value.get("chain", zlib.crc32(body, before))
        data = b"".join(records)
        return spoiler.spoil_bytes(data) if spoiler.rng.random() < 0.4 else data

    yield Target("ledger: records", lines, through(path, lambda: list(read_journal(path))), (LedgerError,), weight=2)

    def restore() -> None:
        with Journal(path) as opened:
            state = ManagerState(ManagerSettings(8, 4, 2, 3, 0, {"train": 64, "eval": 8}))
            state.restore_from(opened.replay())

    yield Target("ledger: restart of a manager", lines, through(path, restore), (LedgerError,))
    yield Target("ledger: audit", lines, through(path, lambda: audit_trial(paths)), (ConfigError,))


def _columns(value: dict[str, Any], rng: Random) -> dict[str, Any]:
    """Those of a snapshot: of one length, its open tickets among them."""
    open_ = [ticket | {"ticket_id": ticket_name(number)} for number, ticket in enumerate(value["open"])]
    outcome = [-1] * len(open_) + [rng.randrange(-2, 5) for _ in range(rng.randrange(4))]
    lag = [rng.choice((-1, 0, 1, 1 << 15, 1 << 31)) if rng.random() < 0.1 else 0 for _ in outcome]
    columns = {"outcome": outcome, "attempt": [0] * len(outcome), "prompt": list(range(len(outcome))), "lag": lag}
    if rng.random() < 0.5:
        columns["stale"] = [rng.choice((0, 1, 255, 256, -1)) if rng.random() < 0.1 else 0 for _ in outcome]
    return {"open": open_, "reasons": ["masked"], **columns}


def weights(folder: Path) -> Iterator[Target]:
    """A manifest, the tensors that it leads to, and deltas."""
    tensors = {"a.weight": ("F32", [4, 2]), "b": ("BF16", [3])}
    model, tmp = folder / "hf", manifest.prepare(folder / "weights", 1, "1")
    model.mkdir()
    layout = {name: (d, shape, int(np.prod(shape)) * manifest.ITEM_BYTES[d]) for name, (d, shape) in tensors.items()}
    data = {name: np.arange(size, dtype=np.uint8) for name, (_, _, size) in layout.items()}
    shard_file = tmp / "model-00001-of-00001.safetensors"
    file, starts = write_safetensors(shard_file, layout, lambda name: data[name])
    infos = {}
    for name, (dtype, shape, size) in layout.items():
        checksum = xxhash.xxh3_64_hexdigest(data[name].data)
        piece = StoredPiece(shard_file.name, starts[name], size, checksum, folder=tmp.name.removesuffix(".tmp"))
        infos[name] = TensorInfo(dtype, shape, checksum, [piece])
    shard = ShardInfo(shard_file.name, file.size, file.checksum, infos)
    final = manifest.commit(tmp, version=1, incarnation="1", step=1, shards=[shard], model_dir=model)
    path = final / manifest.MANIFEST

    def read() -> None:
        with VersionReader(final, manifest.load_manifest(final)) as reader:
            for name in reader.order():
                reader.read(name)

    valid = msgspec.json.encode(manifest.load_manifest(final))

    def huge_or_spoilt(spoiler: Spoiler) -> bytes:
        """Sizes that agree with each other and with no file, among others; also with a right checksum."""
        if spoiler.rng.random() < 0.8:
            content = _sealed(spoiler.spoil(valid), manifest.VERSION)
            return spoiler.spoil_bytes(content) if spoiler.rng.random() < 0.3 else content
        value = msgspec.json.decode(valid)
        elements = 1 << spoiler.rng.randrange(20, 60)
        value["tensors"]["b"]["shape"] = [elements]
        value["tensors"]["b"]["pieces"][0]["size"] = 2 * elements
        return _sealed(spoiler.encode(value), manifest.VERSION)

    yield Target("weights: manifest and tensors", huge_or_spoilt, through(path, read), (WeightsError,))
    yield Target(
        "weights: what pruning reads",
        huge_or_spoilt,
        through(path, lambda: manifest.prune(final.parent, keep=1)),
        (WeightsError,),
    )
    shards = final / shard_file.name
    yield Target("weights: shard", spoilt(shards.read_bytes()), through(shards, read), (WeightsError,))
    old = np.arange(400, dtype=np.uint8)
    new = old.copy()
    new[::7] += 3
    new[100] ^= 128
    blob = delta.encode(old, new, 2)
    assert blob is not None

    def apply(data: bytes) -> None:
        delta.apply(old.copy(), np.frombuffer(data, np.uint8), 2)

    yield Target("weights: delta", _delta(blob.tobytes()), apply, (WeightsError,))


def _delta(valid: bytes) -> Make:
    def make(spoiler: Spoiler) -> bytes:
        counts = list(np.frombuffer(valid[:24], "<u8"))
        if spoiler.rng.random() < 0.5:
            return spoiler.spoil_bytes(valid)
        # Sums that wrap around: as long as the delta is, modulo 2**64.
        at, shift = spoiler.rng.randrange(3), spoiler.rng.choice((1 << 62, 1 << 63, 3 << 62, 1, 1 << 32))
        counts[at] = (int(counts[at]) + shift) % (1 << 64)
        other = spoiler.rng.randrange(3)
        counts[other] = (int(counts[other]) - shift * spoiler.rng.choice((1, 2))) % (1 << 64)
        return np.array([int(c) for c in counts], "<u8").tobytes() + valid[24:]

    return make


def checkpoints(folder: Path) -> Iterator[Target]:
    """state.json, also with a right checksum of nonsense, and the index of a rank."""
    directory = folder / "step-00000001"
    directory.mkdir()
    path = directory / checkpoint.STATE
    state = example(checkpoint.CheckpointState, Random(1)) | {"files": {}}
    path.write_bytes(_sealed(msgspec.json.encode(state), checkpoint.CHECKPOINT))

    def sealed(spoiler: Spoiler) -> bytes:
        content = spoiler.spoil(spoiler.encode(state))
        if spoiler.rng.random() < 0.3:
            return spoiler.spoil_bytes(_sealed(content, checkpoint.CHECKPOINT))
        return _sealed(content, checkpoint.CHECKPOINT)

    def read() -> None:
        checkpoint.check_sizes(directory, checkpoint.read_state(directory))

    yield Target("checkpoint: state", sealed, through(path, read), (CheckpointError,))
    yield Target(
        "checkpoint: index of a rank",
        examples(checkpoint.RankIndex),
        lambda data: checkpoint.decode_index(data, directory / "actor.json"),
        (CheckpointError,),
    )


def records(folder: Path) -> Iterator[Target]:
    """The record of a step, also with a right checksum of nonsense, and its arrays."""
    directory = folder / "step-00000001"
    directory.mkdir()
    path = directory / record.BATCH
    value = example(record.StepRecord, Random(1)) | {"files": {}}
    path.write_bytes(_sealed(msgspec.json.encode(value), record.RECORD))

    def sealed(spoiler: Spoiler) -> bytes:
        content = _sealed(spoiler.spoil(spoiler.encode(value)), record.RECORD)
        return spoiler.spoil_bytes(content) if spoiler.rng.random() < 0.3 else content

    yield Target("record: batch", sealed, through(path, lambda: record.read_record(directory)), (RecordError,))
    arrays = {("t/0", "tokens"): np.arange(5, dtype=np.int32), ("t/1", "tokens"): np.arange(3, dtype=np.int32)}
    file = directory / record.worker_file(0)
    file.write_bytes(valid := record.encode_worker_file(0, 1, arrays, []))

    def arrays_of(spoiler: Spoiler) -> bytes:
        size = int.from_bytes(valid[:8], "little")
        if spoiler.rng.random() < 0.4:
            return spoiler.spoil_bytes(valid)
        header = spoiler.spoil(valid[8 : 8 + size].rstrip())
        return len(header).to_bytes(8, "little") + header + valid[8 + size :]

    def read() -> None:
        record.read_worker_file(directory, 0)

    yield Target("record: arrays", arrays_of, through(file, read), (RecordError,))


def _sealed(content: bytes, kind: FolderFormat[Any]) -> bytes:
    """The file of a manifest with this content, and with a checksum that is right."""
    checksum = xxhash.xxh3_64_hexdigest(content).encode()
    return b'{"format":%d,"checksum":"%b","content":%b}' % (kind.number, checksum, content)


def others(folder: Path) -> Iterator[Target]:
    """The step log, error records, keys, the dumped configuration, lines of a dataset."""
    steps = folder / "steps.jsonl"
    steps.touch()
    trained = {"kind": "train", "step": 3, "version": 2, "time": 1.5, "stats": {"loss": 0.1}, "groups": 4}

    def log(spoiler: Spoiler) -> bytes:
        kinds = [trained, {"kind": "recovered", "step": 1}, {"kind": "eval", "step": 2, "accuracy": 0.5}]
        lines = [spoiler.encode(value) for value in spoiler.rng.sample(kinds, 2)]
        return b"\n".join([spoiler.spoil(lines[0]), *lines[1:], b""])

    yield Target("step log", log, through(steps, lambda: TrialProgress().add(read_steps(steps))), (), weight=2)
    errors = folder / "errors"
    valid = write_error(errors, record_of("model_worker", 0, RuntimeError("x")))
    write_error(errors, record_of("model_worker", 1, RuntimeError("y")))

    def read() -> None:
        for found in read_errors(errors):
            assert isinstance(found, ErrorRecord) and str(found)

    yield Target("error record", spoilt(valid.read_bytes()), through(valid, read), ())
    ensure_keys(folder / "keys")
    keys = folder / "keys" / KEY_FILE

    def use() -> None:
        assert isinstance(load_keys(folder / "keys"), CurveKeys)

    yield Target("stream keys", spoilt(keys.read_bytes()), through(keys, use), (StreamError,))
    dump = folder / "config.json"
    dump.write_text(Config().model_dump_json())
    yield Target(
        "configuration", spoilt(dump.read_bytes()), through(dump, lambda: read_config(dump)), (ConfigError,), weight=0.3
    )
    for kind in (Problem, Demonstration, Preference):
        reader: Any = LineReader(kind)
        yield Target(
            f"dataset: {kind.__name__}",
            examples(kind),
            lambda data, reader=reader: reader.decode(Path("x.jsonl"), 1, data),
            (DataError,),
        )
