"""Weights on disk: commit, verification, staging, pruning."""

import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from realsys.errors import WeightsError
from realsys.types import ShardInfo
from realsys.weights import manifest as m
from realsys.weights.shards import write_shard
from realsys.weights.stage import stage


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
    shards = [write_shard(tmp / f"model-{i:05d}-of-00002.safetensors", tensors(i)) for i in (1, 2)]
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
    assert m.verify(final, 3).files == staged.manifest.files


def test_folder_without_manifest_is_no_version(tmp_path, model_dir):
    root = tmp_path / "w"
    tmp = m.prepare(root, 1, "a")
    write_shard(tmp / "model-00001-of-00001.safetensors", tensors(1))
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
    with pytest.raises((WeightsError, FileNotFoundError)):
        m.verify(final, 1)


def test_wrong_version_is_refused(tmp_path, model_dir):
    final = committed(tmp_path / "w", 4, model_dir)
    with pytest.raises(WeightsError, match="holds version 4, version 5 was asked for"):
        stage(final, 5)


def test_garbage_and_escaping_manifests_are_refused(tmp_path, model_dir):
    final = committed(tmp_path / "w", 1, model_dir)
    good = (final / m.MANIFEST).read_text()
    (final / m.MANIFEST).write_text("{")
    with pytest.raises(WeightsError, match="cannot be read"):
        stage(final, 1)
    (final / m.MANIFEST).write_text(good.replace("model-00001-of-00002.safetensors", "../../model/config.json"))
    with pytest.raises(WeightsError, match="outside its folder"):
        stage(final, 1)


def test_commit_refuses_missing_short_and_doubled_shards(tmp_path, model_dir):
    root = tmp_path / "w"
    tmp = m.prepare(root, 1, "a")
    shard = write_shard(tmp / "one.safetensors", tensors(1))
    kwargs = {"version": 1, "incarnation": "a", "step": 1, "model_dir": model_dir}
    with pytest.raises(WeightsError, match="-1 bytes"):
        m.commit(tmp, shards=[shard, ShardInfo("gone.safetensors", 5, "0", {"x": 5})], **kwargs)
    with pytest.raises(WeightsError, match="is in one.safetensors and in two.safetensors"):
        m.commit(tmp, shards=[shard, write_shard(tmp / "two.safetensors", tensors(1))], **kwargs)
    with pytest.raises(WeightsError, match="no rank wrote"):
        m.commit(tmp, shards=[], **kwargs)
    assert m.complete_versions(root) == []


def test_prune_keeps_the_newest_and_those_in_use(tmp_path, model_dir):
    root = tmp_path / "w"
    paths = [committed(root, v, model_dir) for v in range(5)]
    gone = m.prune(root, keep=2, in_use=[paths[1]])
    assert gone == [paths[0], paths[2]]
    assert [v for v, _, _ in m.complete_versions(root)] == [1, 3, 4]


def test_export_copy_replaces_the_target_whole(tmp_path, model_dir):
    final = committed(tmp_path / "w", 1, model_dir)
    target = tmp_path / "checkpoint"
    target.mkdir()
    (target / "stale").write_text("x")
    m.export_copy(final, target)
    assert sorted(p.name for p in target.iterdir()) == sorted(p.name for p in final.iterdir())


def test_full_disk_is_named_and_leaves_the_last_version(tmp_path, model_dir):
    """RLIMIT_FSIZE stands in for the full disk: the same OSError path of write()."""
    root = tmp_path / "w"
    committed(root, 1, model_dir)
    tmp = m.prepare(root, 2, "a")
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
        try:
            write_shard(tmp / "model-00001-of-00001.safetensors", tensors(1))
        except WeightsError as error:
            os._exit(7 if "cannot write" in str(error) else 8)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert [v for v, _, _ in m.complete_versions(root)] == [1]
