"""Weights on disk (``fenced-weights``, ``monotonic``): commit, verification, staging, pruning."""

import json
import os
import resource
import signal
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from realsys.cluster.commit_folder import Removed
from realsys.errors import WeightsError
from realsys.weights.disk import manifest as m
from realsys.weights.disk import reader
from realsys.weights.disk.delta import Bytes
from realsys.weights.disk.manifest import ShardInfo, StoredPiece, TensorInfo
from realsys.weights.disk.plain_folders import materialise
from realsys.weights.disk.reader import VersionReader
from realsys.weights.disk.stage import HeldWeights, stage
from realsys.weights.disk.writer import ShardWriter

BOUND_S = 60.0  # only a hang reaches it


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "qwen2"}')
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"old weights must not be copied")
    return path


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"t{seed}.{i}": torch.randn(4, 3, generator=generator) for i in range(2)}


def committed(root: Path, version: int, model_dir: Path, incarnation: str = "a") -> Path:
    tmp = m.prepare(root, version, incarnation)
    shards = [ShardWriter().write(tmp / f"model-{i:05d}-of-00002.safetensors", tensors(i)) for i in (1, 2)]
    return m.commit(tmp, version=version, incarnation=incarnation, step=version, shards=shards, model_dir=model_dir)


def test_committed_version_stages_to_the_written_tensors(tmp_path, model_dir):
    final = committed(tmp_path / "w", 3, model_dir)
    assert sorted(p.name for p in final.iterdir()) == [
        "MANIFEST.json",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    staged = stage(final, 3)
    expected = {**tensors(1), **tensors(2)}
    assert staged.tensors.keys() == expected.keys()
    assert all(torch.equal(staged.tensors[k], expected[k]) for k in expected)
    assert (staged.counts["whole"], staged.counts["bytes_read"], staged.counts["bytes"]) == (4, 4 * 48, 4 * 48)
    assert staged.timings.keys() == {"read_s", "verify_s", "apply_s"}


@pytest.mark.parametrize(
    ("config", "key"),
    [('{"model_type": "qwen2", "torch_dtype": "float32"}', "torch_dtype"), ('{"dtype": "float32"}', "dtype")],
)
def test_config_names_the_type_of_the_weights(tmp_path, model_dir, config, key):
    """A model in bfloat16 whose config says float32 takes twice the memory when it is loaded."""
    (model_dir / "config.json").write_text(config)
    tmp = m.prepare(tmp_path / "w", 1, "a")
    weights = {name: tensor.bfloat16() for name, tensor in tensors(1).items()}
    shards = [ShardWriter().write(tmp / "model-00001-of-00001.safetensors", weights)]
    final = m.commit(tmp, version=1, incarnation="a", step=1, shards=shards, model_dir=model_dir)
    assert json.loads((final / "config.json").read_text()) == {**json.loads(config), key: "bfloat16"}


def test_version_with_the_same_bytes_is_unchanged(tmp_path, model_dir):
    """After a version that is damaged nothing counts as unchanged: the reader has no version to compare with."""
    held, folders = HeldWeights(), [committed(tmp_path / "w", version, model_dir) for version in range(4)]
    assert not stage(folders[0], 0, held).unchanged
    assert stage(folders[1], 1, held).unchanged
    shard = folders[2] / "model-00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(WeightsError):
        stage(folders[2], 2, held)
    assert not stage(folders[3], 3, held).unchanged


def test_unchanged_version_of_the_engine_is_not_read(tmp_path, model_dir):
    held, folders = HeldWeights(), [committed(tmp_path / "w", version, model_dir) for version in range(2)]
    first = stage(folders[0], 0, held)
    staged = stage(folders[1], 1, held, loaded=True)
    assert staged.unchanged and not staged.tensors
    assert staged.counts["bytes_read"] == 0 and staged.counts["kept"] == len(first.tensors)
    assert held.newest[1] == 1


def test_manifest_and_index_describe_the_files(tmp_path, model_dir):
    """An independent reader: json, xxhash and the offsets of the manifest, against safetensors' reading of the file."""
    final = committed(tmp_path / "w", 3, model_dir)
    envelope = json.loads((final / m.MANIFEST).read_text())
    manifest = envelope["content"]
    assert envelope["format"] == 2
    assert (manifest["version"], manifest["incarnation"], manifest["step"], manifest["needs"]) == (3, "a", 3, [])
    for name, file in manifest["files"].items():
        content = (final / name).read_bytes()
        assert (len(content), xxhash.xxh3_64_hexdigest(content)) == (file["size"], file["checksum"])
    for name, info in manifest["tensors"].items():
        [piece] = info["pieces"]
        data = (final / piece["file"]).read_bytes()[piece["start"] : piece["start"] + piece["size"]]
        assert (info["dtype"], info["shape"]) == ("F32", [4, 3])
        assert data == load_file(final / piece["file"])[name].numpy().tobytes()
        assert piece["checksum"] == info["checksum"] == xxhash.xxh3_64_hexdigest(data)
    index = json.loads((final / m.INDEX).read_text())
    assert index["metadata"] == {"total_size": 4 * 48}
    assert index["weight_map"]["t2.0"] == "model-00002-of-00002.safetensors"


def test_every_type_and_shape_survives(tmp_path, model_dir):
    written = {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "eighth": torch.randn(5, 3).to(torch.float8_e4m3fn),
        "turned": torch.arange(6, dtype=torch.float64).reshape(2, 3).t(),
        "half": torch.randn(7).to(torch.bfloat16),
        "ids": torch.tensor([[-1, 2**40]]),
    }
    tmp = m.prepare(tmp_path / "w", 1, "a")
    shard = ShardWriter().write(tmp / "model-00001-of-00001.safetensors", written)
    final = m.commit(tmp, version=1, incarnation="a", step=1, shards=[shard], model_dir=model_dir)
    for found in (stage(final, 1).tensors, load_file(final / shard.file)):
        assert found.keys() == written.keys()
        for name, tensor in written.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found[name].double(), tensor.double())


def test_type_without_a_name_is_refused(tmp_path):
    tmp = m.prepare(tmp_path, 1, "a")
    with pytest.raises(WeightsError, match=r"tensor phase is of type torch.complex64"):
        ShardWriter().write(tmp / "x.safetensors", {"phase": torch.zeros(2, dtype=torch.complex64)})


def test_folder_without_manifest_is_no_version(tmp_path, model_dir):
    root = tmp_path / "w"
    tmp = m.prepare(root, 1, "a")
    ShardWriter().write(tmp / "model-00001-of-00001.safetensors", tensors(1))
    assert m.complete_versions(root) == []
    with pytest.raises(WeightsError, match=r"no MANIFEST.json"):
        stage(tmp, 1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "truncated"),
        (lambda p: p.write_bytes(p.read_bytes()[:-1] + bytes([p.read_bytes()[-1] ^ 1])), "corrupt"),
        (lambda p: p.unlink(), "cannot be read"),
    ],
)
def test_damaged_shard_is_never_staged(tmp_path, model_dir, damage, message):
    final = committed(tmp_path / "w", 1, model_dir)
    damage(final / "model-00002-of-00002.safetensors")
    with pytest.raises(WeightsError, match=message):
        stage(final, 1)
    with pytest.raises(WeightsError, match=message):
        materialise(final, tmp_path / "copy")
    assert not list(tmp_path.glob("copy*"))


def test_wrong_version_is_refused(tmp_path, model_dir):
    final = committed(tmp_path / "w", 4, model_dir)
    with pytest.raises(WeightsError, match="holds version 4, version 5 was requested"):
        stage(final, 5)


def test_garbage_and_escaping_manifests_are_refused(tmp_path, model_dir):
    final = committed(tmp_path / "w", 1, model_dir)
    good = json.dumps(json.loads((final / m.MANIFEST).read_text())["content"])
    (final / m.MANIFEST).write_text("{")
    with pytest.raises(WeightsError, match="is corrupt"):
        stage(final, 1)
    for old, new, message in [
        ("model-00001-of-00002.safetensors", "../../model/config.json", "outside its folder"),
        ('"dtype": "F32"', '"dtype": "F31"', "no such tensor"),
        ('"size": 48', '"size": 44', "must begin with a piece of all its 48 bytes"),
        ('"start": ', '"folder": "../v1", "start": ', "out of bounds"),
        ('"start": ', '"base": "00", "start": ', "must begin with a piece"),
    ]:
        assert old in good
        content = good.replace(old, new)
        checksum = xxhash.xxh3_64_hexdigest(content.encode())
        (final / m.MANIFEST).write_text(f'{{"format": 2, "checksum": "{checksum}", "content": {content}}}')
        with pytest.raises(WeightsError, match=message):
            stage(final, 1)


def test_commit_refuses_missing_short_and_doubled_shards(tmp_path, model_dir):
    root = tmp_path / "w"
    tmp = m.prepare(root, 1, "a")
    shard = ShardWriter().write(tmp / "one.safetensors", tensors(1))
    kwargs = {"version": 1, "incarnation": "a", "step": 1, "model_dir": model_dir}
    gone = ShardInfo(
        "gone.safetensors", 5, "0", {"x": TensorInfo("U8", [5], "0", [StoredPiece("gone.safetensors", 0, 5, "0")])}
    )
    with pytest.raises(WeightsError, match=r"gone\.safetensors cannot be read: No such file"):
        m.commit(tmp, shards=[shard, gone], **kwargs)
    with pytest.raises(WeightsError, match="is in one.safetensors and in two.safetensors"):
        m.commit(tmp, shards=[shard, ShardWriter().write(tmp / "two.safetensors", tensors(1))], **kwargs)
    with pytest.raises(WeightsError, match="no rank wrote"):
        m.commit(tmp, shards=[], **kwargs)
    assert m.complete_versions(root) == []


def test_prune_keeps_the_newest_and_those_in_use(tmp_path, model_dir):
    root = tmp_path / "w"
    paths = [committed(root, v, model_dir) for v in range(5)]
    assert m.prune(root, keep=2, in_use=[paths[1]]) == Removed([str(paths[0]), str(paths[2])])
    assert [v for v, _, _ in m.complete_versions(root)] == [1, 3, 4]


def test_earlier_incarnations_are_pruned_as_older_versions(tmp_path, model_dir):
    """Training went back from 7 to 5: the newest of before stays for as long as a server may be reading it."""
    root = tmp_path / "w"
    before = [committed(root, v, model_dir, "0001") for v in (6, 7)]
    first = committed(root, 5, model_dir, "0002")
    assert m.prune(root, keep=2, in_use=[first]).gone == [str(before[0])]
    second = committed(root, 6, model_dir, "0002")
    assert m.prune(root, keep=2, in_use=[second]).gone == [str(before[1])]
    assert [(v, i) for v, i, _ in m.complete_versions(root)] == [(5, "0002"), (6, "0002")]


def test_only_unfinished_versions_are_discarded(tmp_path, model_dir):
    """A dead trainer left one half removed and one half written."""
    root = tmp_path / "w"
    assert m.VERSION.unfinished(root) == []
    whole, half = committed(root, 1, model_dir, "0001"), committed(root, 2, model_dir, "0001")
    (half / m.MANIFEST).unlink()  # killed while it was being removed
    tmp = m.prepare(root, 3, "0001")
    (tmp / "model-00001-of-00001.safetensors").write_bytes(b"half")
    (root / "notes").mkdir()
    assert m.VERSION.remove(m.VERSION.unfinished(root)) == Removed([str(half), str(tmp)])
    assert sorted(root.iterdir()) == [root / "notes", whole]


def test_older_incarnation_is_not_staged(tmp_path, model_dir):
    """``monotonic``: a lower version of a later incarnation is newer."""
    root, held = tmp_path / "w", HeldWeights()
    old, older = committed(root, 7, model_dir, "0001"), committed(root, 6, model_dir, "0001")
    stage(old, 7, held)
    with pytest.raises(WeightsError, match="v00000006.0001 is older than version 7 of trainer 0001"):
        stage(older, 6, held)
    back = committed(root, 5, model_dir, "0002")
    stage(back, 5, held)
    assert held.newest == ("0002", 5)
    with pytest.raises(WeightsError, match="v00000007.0001 is older than version 5 of trainer 0002"):
        stage(old, 7, held)
    stage(back, 5, held)  # a repeated request
    stage(old, 7, HeldWeights())  # a new server accepts any version


def test_materialise_replaces_the_target_whole(tmp_path, model_dir):
    final = committed(tmp_path / "w", 1, model_dir)
    target = tmp_path / "checkpoint"
    target.mkdir()
    (target / "stale").write_text("x")
    materialise(final, target, 1)
    assert sorted(p.name for p in target.iterdir()) == [
        "MANIFEST.json",
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    expected = {**tensors(1), **tensors(2)}
    for found in (load_file(target / "model-00001-of-00001.safetensors"), stage(target, 1).tensors):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(WeightsError, match="holds version 1, version 2 was requested"):
        materialise(final, target, 2)
    assert m.load_manifest(target).version == 1


def test_staging_allocates_the_tensors_only(tmp_path, model_dir):
    """numpy reports its allocations to tracemalloc. Eight tensors of 1 MB."""
    tmp = m.prepare(tmp_path / "w", 1, "a")
    written = {f"t{i}": torch.full((1 << 18,), float(i)) for i in range(8)}
    shard = ShardWriter().write(tmp / "model-00001-of-00001.safetensors", written)
    final = m.commit(tmp, version=1, incarnation="a", step=1, shards=[shard], model_dir=model_dir)
    tracemalloc.start()
    try:
        staged = stage(final, 1)
        assert tracemalloc.get_traced_memory()[1] < 8.2 * (1 << 20)
        del staged
        assert tracemalloc.get_traced_memory()[0] < 0.2 * (1 << 20)
        tracemalloc.reset_peak()
        materialise(final, tmp_path / "plain")
        assert tracemalloc.get_traced_memory()[1] < 2.2 * (1 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.processes
def test_full_disk_leaves_the_last_version(tmp_path, model_dir):
    """RLIMIT_FSIZE replaces the full disk: write() raises the same error."""
    root = tmp_path / "w"
    committed(root, 1, model_dir)
    tmp = m.prepare(root, 2, "a")
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
        try:
            ShardWriter().write(tmp / "model-00001-of-00001.safetensors", tensors(1))
        except WeightsError as error:
            os._exit(7 if "cannot write" in str(error) else 8)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert [v for v, _, _ in m.complete_versions(root)] == [1]


def large(root: Path, model_dir: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a version of four tensors in two files, and the tensors."""
    written = {name: torch.randn(1000) for name in ("a", "b", "c", "d")}
    tmp = m.prepare(root, 0, "a")
    shards = [
        ShardWriter().write(tmp / f"model-{first}.safetensors", {name: written[name] for name in (first, second)})
        for first, second in ("ab", "cd")
    ]
    return m.commit(tmp, version=0, incarnation="a", step=0, shards=shards, model_dir=model_dir), written


@pytest.mark.parametrize(
    ("size", "cores", "threads"), [(0, 8, 1), (63 << 20, 8, 1), (1 << 30, 2, 1), (1 << 30, 8, 4), (1 << 40, 128, 8)]
)
def test_large_versions_are_read_by_threads(size: int, cores: int, threads: int) -> None:
    assert reader.reading_threads(size, cores) == threads


def test_threads_read_at_the_same_time(tmp_path, model_dir, monkeypatch):
    """Two readers meet in the middle of a tensor, and the sum of what they read is the version."""
    directory, written = large(tmp_path / "w", model_dir)
    monkeypatch.setattr(reader, "reading_threads", lambda size, cores: 2)
    meeting, fetch, held = threading.Barrier(2), VersionReader._fetch, HeldWeights(everything=True)
    monkeypatch.setattr(VersionReader, "_fetch", lambda *args: (meeting.wait(BOUND_S), fetch(*args))[1])
    staged = stage(directory, 0, held)
    assert staged.tensors.keys() == held.tensors.keys() == written.keys()
    assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in written.items())
    assert (staged.counts["whole"], staged.counts["bytes_read"]) == (4, 16000)
    assert staged.timings["read_s"] > 0


def test_error_of_a_thread_ends_the_others(tmp_path, model_dir, monkeypatch):
    """The second thread is in the middle of its tensor when the first one finds the damage. It reads no other."""
    directory, _ = large(tmp_path / "w", model_dir)
    monkeypatch.setattr(reader, "reading_threads", lambda size, cores: 2)
    path = directory / "model-a.safetensors"
    content = bytearray(path.read_bytes())
    content[-4001] ^= 1  # the last byte of "a"
    path.write_bytes(content)
    threads, both, fetch = {}, threading.Barrier(2), VersionReader._fetch

    def watched(own: VersionReader, piece: StoredPiece, name: str, into: Bytes) -> None:
        threads[name] = threading.current_thread()
        both.wait(BOUND_S)
        if name == "b":
            threads["a"].join(BOUND_S)
        fetch(own, piece, name, into)

    monkeypatch.setattr(VersionReader, "_fetch", watched)
    with pytest.raises(WeightsError, match=r"model-a\.safetensors: the bytes of tensor a have checksum .*: corrupt"):
        stage(directory, 0)
    assert threads.keys() == {"a", "b"}
