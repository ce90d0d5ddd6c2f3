"""Versions that refer to earlier ones: the files, the reads of a server, pruning, refusals.

Every version is written by two writers, as two ranks would, committed, and read by servers that hold different pasts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from realsys.errors import WeightsError
from realsys.weights.disk import delta
from realsys.weights.disk import manifest as m
from realsys.weights.disk.plain_folders import materialise
from realsys.weights.disk.stage import HeldWeights, stage
from realsys.weights.disk.writer import ShardWriter

Tensors = dict[str, torch.Tensor]


def words(*values: int) -> np.ndarray:
    return np.array(values, np.uint16)


# ---- one tensor


def test_delta_has_the_documented_bytes() -> None:
    old, new = np.zeros(300, np.uint16), np.zeros(300, np.uint16)
    new[0], new[256], new[299] = 1, 0xFFFF, 500
    blob = delta.encode(old.view(np.uint8), new.view(np.uint8), 2)
    assert blob is not None
    counts = np.array([1, 4, 3], "<u8").tobytes()  # one wide value, four steps, three moves
    # Element 0 skips none, 256 skips 255 = one full skip and none, 299 skips 42; +1, -1 and one that does not fit.
    assert blob.tobytes() == counts + words(500).tobytes() + bytes([0, 255, 0, 42]) + bytes([1, 0xFF, 0x80])
    assert blob.nbytes == 24 + 2 + 4 + 3


@pytest.mark.parametrize("word", [np.uint16, np.uint32])
@pytest.mark.parametrize("share", [0.0, 1e-5, 0.001, 0.05, 0.2])
def test_a_delta_is_lossless(word: type, share: float) -> None:
    """Any bit patterns: also NaNs, both zeros, sign changes, and a difference of exactly -128. Over several blocks."""
    rng = np.random.default_rng(5)
    old = rng.integers(0, np.iinfo(word).max, 700_001, word, endpoint=True)
    new = old.copy()
    at = np.flatnonzero(rng.random(old.size) < share)
    new[at] += rng.choice(np.array([1, -1, 127, -127, -128, 128, 1 << 15], np.int64), at.size).astype(word)
    blob = delta.encode(old.view(np.uint8), new.view(np.uint8), old.itemsize)
    # A byte of distance and one of difference; three of the seven differences do not fit and take a word more.
    assert blob is not None
    assert blob.nbytes <= 24 + old.size / 255 + 1 + at.size * (2 + 0.5 * old.itemsize)
    found = old.copy()
    delta.apply(found.view(np.uint8), blob, old.itemsize)
    assert np.array_equal(found, new)


def test_a_delta_that_would_not_pay_is_none() -> None:
    old = np.zeros(1000, np.uint16)
    assert delta.encode(old.view(np.uint8), (old + 1).view(np.uint8), 2) is None  # two bytes for each of two
    assert delta.encode(old.view(np.uint8), old[:-1].view(np.uint8), 2) is None
    assert delta.encode(old.view(np.uint8), old.view(np.uint8), 1) is None


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (np.zeros(8, np.uint8), "too short"),
        (np.array([0, 9, 0], "<u8").view(np.uint8), "has a header for 33 bytes"),
        (np.r_[np.array([0, 1, 1], "<u8").view(np.uint8), np.array([4, 1], np.uint8)], "does not fit a tensor of 4"),
        (np.r_[np.array([0, 1, 0], "<u8").view(np.uint8), np.array([1], np.uint8)], "does not fit"),
        (np.r_[np.array([0, 1, 1], "<u8").view(np.uint8), np.array([1, 0x80], np.uint8)], "does not fit"),
        (np.r_[np.array([0, 0, 1], "<u8").view(np.uint8), np.array([1], np.uint8)], "does not fit"),
    ],
)
def test_bytes_that_are_no_delta_are_refused(blob: np.ndarray, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        delta.apply(np.zeros(8, np.uint8), blob, 2)


# ---- versions


class Trainer:
    """Two ranks that train a model in bf16: matrices move a little at every step, the embedding is frozen."""

    def __init__(self, root: Path, *, deltas: bool, full_every: int = 4) -> None:
        self.root, self.truth = root / "weights", dict[int, Tensors]()
        self._model_dir = root / "model"
        self._model_dir.mkdir()
        (self._model_dir / "config.json").write_text("{}")
        self._writers = [ShardWriter(deltas=deltas, full_every=full_every) for _ in range(2)]
        self._random = torch.Generator().manual_seed(3)
        self._master = {f"layer.{i}": torch.randn(120, 50, generator=self._random) * 0.02 for i in range(4)}
        self._frozen = {"embed": torch.randn(900, 50, generator=self._random).bfloat16()}
        self.versions: list[Path] = []

    def step(self, lr: float, *, base: str | None = None) -> Path:
        """Train and publish; returns the version's folder."""
        for tensor in self._master.values():
            tensor += lr * torch.randn(tensor.shape, generator=self._random).clamp(-1, 1)
        version = len(self.versions)
        state = {**self._frozen, **{name: tensor.bfloat16() for name, tensor in self._master.items()}}
        self.truth[version] = {name: tensor.clone() for name, tensor in state.items()}
        before = self.versions[-1].name if self.versions else ""
        tmp = m.prepare(self.root, version, "run")
        halves = [{name: state[name] for name in sorted(state)[rank::2]} for rank in range(2)]
        shards = [
            writer.write(tmp / f"model-{rank + 1:05d}-of-00002.safetensors", half, before if base is None else base)
            for rank, (writer, half) in enumerate(zip(self._writers, halves, strict=True))
        ]
        self.versions.append(
            m.commit(tmp, version=version, incarnation="run", step=version, shards=shards, model_dir=self._model_dir)
        )
        return self.versions[-1]

    def check(self, version: int, found: Tensors) -> None:
        assert found.keys() == self.truth[version].keys()
        for name, tensor in self.truth[version].items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name


FROZEN, LAYER = 900 * 50 * 2, 120 * 50 * 2


def files_of(path: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in path.iterdir() if p.name.startswith("model-")}


def test_frozen_tensors_are_written_and_read_once(tmp_path: Path) -> None:
    trainer, held = Trainer(tmp_path, deltas=False), HeldWeights()
    for version in range(4):
        path = trainer.step(1e-3)
        staged = stage(path, version, held)
        trainer.check(version, staged.tensors)
        # The embedding is held from the first version on that shows it to be frozen.
        expected = FROZEN + 4 * LAYER if version < 2 else 4 * LAYER
        assert staged.counts["bytes_read"] == expected
        assert held.tensors.keys() == ({"embed"} if version else set())
    assert staged.counts["kept"] == 1 and staged.counts["whole"] == 4
    assert m.load_manifest(path).needs == ["v00000000.run"]
    assert sum(files_of(path).values()) < 4 * LAYER + 2000
    trainer.check(3, stage(path, 3).tensors)  # a server that joins late


def test_version_with_references_is_no_model_folder(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, deltas=False)
    assert files_of(trainer.step(1e-3)).keys() == {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    second = trainer.step(1e-3)
    assert files_of(second).keys() == {f"model-0000{i}-of-00002.part" for i in (1, 2)}
    assert not (second / m.INDEX).exists()
    materialise(second, tmp_path / "plain", 1)
    trainer.check(1, load_file(tmp_path / "plain" / "model-00001-of-00001.safetensors"))
    shutil.rmtree(trainer.root)
    trainer.check(1, stage(tmp_path / "plain", 1).tensors)  # refers to nothing outside


def test_small_unchanged_tensors_keep_no_old_files(tmp_path: Path) -> None:
    writer, root = ShardWriter(), tmp_path / "weights"
    norm, base = torch.ones(100, dtype=torch.bfloat16), ""
    for version in range(3):
        tmp = m.prepare(root, version, "run")
        big = torch.full((5000,), float(version), dtype=torch.bfloat16)
        shard = writer.write(tmp / "model-00001-of-00001.safetensors", {"big": big, "norm": norm}, base)
        path = m.commit(tmp, version=version, incarnation="run", step=0, shards=[shard], model_dir=root)
        base = path.name
        assert m.load_manifest(path).needs == []
        assert (path / m.INDEX).exists()


def test_deltas_serve_followers_skippers_and_newcomers(tmp_path: Path) -> None:
    """One server takes each version, one skips versions, one joins late."""
    trainer = Trainer(tmp_path, deltas=True, full_every=4)
    following, skipping = HeldWeights(everything=True), HeldWeights(everything=True)
    for version in range(9):
        path = trainer.step(1e-5)
        staged = stage(path, version, following)
        trainer.check(version, staged.tensors)
        if version % 4:  # 0, 4 and 8 are whole
            assert (staged.counts["changed"], staged.counts["kept"], staged.counts["whole"]) == (4, 1, 0)
            assert staged.counts["bytes_read"] < 4 * LAYER * 0.45
            assert sum(files_of(path).values()) < 4 * LAYER * 0.45 + 2000
        if version % 3 == 0:
            trainer.check(version, stage(path, version, skipping).tensors)
        trainer.check(version, stage(path, version).tensors)
    chain = m.load_manifest(trainer.versions[7]).tensors["layer.0"].pieces
    assert [bool(piece.base) for piece in chain] == [False, True, True, True]
    assert [piece.folder for piece in chain] == ["v00000004.run", "v00000005.run", "v00000006.run", ""]


def test_tensors_that_change_everywhere_are_written_whole(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, deltas=True)
    trainer.step(1e-3)
    staged = stage(trainer.step(1e-1), 1, HeldWeights(everything=True))
    trainer.check(1, staged.tensors)
    assert (staged.counts["changed"], staged.counts["whole"]) == (0, 5)


def test_pruning_keeps_what_kept_versions_refer_to(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, deltas=True, full_every=4)
    for version in range(7):
        trainer.step(1e-5)
        m.prune(trainer.root, keep=1)
        trainer.check(version, stage(trainer.versions[version], version).tensors)
        kept = [number for number, _, _ in m.complete_versions(trainer.root)]
        # The chain of the newest version; the frozen embedding is the half of version 0's file that keeps it.
        assert set(range(version // 4 * 4, version + 1)) <= set(kept) <= {0, *range(version // 4 * 4, version + 1)}


@pytest.mark.parametrize("base", ["", "v00000007.run"])
def test_writers_without_that_base_write_everything(tmp_path: Path, base: str) -> None:
    trainer = Trainer(tmp_path, deltas=True)
    trainer.step(1e-5)
    path = trainer.step(1e-5, base=base)
    assert m.load_manifest(path).needs == []
    trainer.check(1, load_tensors(path))


def load_tensors(path: Path) -> Tensors:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_writer_after_a_failed_write_writes_everything(tmp_path: Path) -> None:
    writer = ShardWriter(deltas=True, full_every=8)
    tensors = {"a": torch.ones(1000, dtype=torch.bfloat16)}
    first = m.prepare(tmp_path, 1, "run")
    writer.write(first / "model-00001-of-00001.safetensors", tensors)
    with pytest.raises(WeightsError, match="cannot write"):
        writer.write(tmp_path / "v00000002.run.tmp" / "x.safetensors", tensors, "v00000001.run")
    third = m.prepare(tmp_path, 3, "run")
    shard = writer.write(third / "model-00001-of-00001.safetensors", tensors, "v00000001.run")
    assert [piece.base for piece in shard.tensors["a"].pieces] == [""]


def test_writer_remembers_the_published_weights(tmp_path: Path) -> None:
    """Later training does not change them.

    The exported tensors may be the trainer's own parameters: the base of a delta must be a copy of them.
    """
    writer, root = ShardWriter(deltas=True, full_every=8), tmp_path / "w"
    parameter = torch.zeros(1000, dtype=torch.bfloat16)
    held, base = HeldWeights(everything=True), ""
    for version in range(3):
        parameter[version] = 1.0
        tmp = m.prepare(root, version, "run")
        shard = writer.write(tmp / "model-00001-of-00001.safetensors", {"p": parameter}, base)
        path = m.commit(tmp, version=version, incarnation="run", step=0, shards=[shard], model_dir=root)
        assert torch.equal(stage(path, version, held).tensors["p"], parameter)
        base = path.name


def test_written_parameters_can_be_offloaded(tmp_path: Path) -> None:
    """Memory that numpy has looked into through torch cannot be given back by resizing it."""
    parameter = torch.ones(1000, dtype=torch.bfloat16)
    tmp = m.prepare(tmp_path, 0, "run")
    ShardWriter(deltas=True).write(tmp / "model-00001-of-00001.safetensors", {"p": parameter})
    parameter.untyped_storage().resize_(0)
    assert parameter.untyped_storage().size() == 0


# ---- bad input


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda old, new: flip(new / "model-00001-of-00002.part"), "of tensor .* have checksum .* corrupt"),
        (lambda old, new: cut(new / "model-00001-of-00002.part"), "ends at byte .* truncated"),
        (lambda old, new: (new / "model-00001-of-00002.part").unlink(), "cannot be read, but it is in the manifest"),
    ],
)
def test_damaged_delta_is_refused(tmp_path: Path, damage: Callable[[Path, Path], None], message: str) -> None:
    """The server continues with the version that it has."""
    trainer, held = Trainer(tmp_path, deltas=True, full_every=8), HeldWeights(everything=True)
    old = trainer.step(1e-5)
    stage(old, 0, held)
    new = trainer.step(1e-5)
    good = tmp_path / "good"
    shutil.copytree(new, good)
    damage(old, new)
    with pytest.raises(WeightsError, match=message):
        stage(new, 1, held)
    shutil.rmtree(new)
    good.rename(new)
    later = trainer.step(1e-5)
    trainer.check(2, stage(later, 2, held).tensors)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_missing_base_is_named(tmp_path: Path) -> None:
    """Only a server that does not hold it needs it."""
    trainer, held = Trainer(tmp_path, deltas=True), HeldWeights(everything=True)
    stage(trainer.step(1e-5), 0, held)
    path = trainer.step(1e-5)
    shutil.rmtree(trainer.versions[0])
    with pytest.raises(WeightsError, match=r"v00000000.run/.*cannot be read, but v00000001.run needs it"):
        stage(path, 1)
    trainer.check(1, stage(path, 1, held).tensors)


def test_commit_refuses_a_version_without_its_base(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, deltas=True)
    shutil.rmtree(trainer.step(1e-5))
    with pytest.raises(WeightsError, match=r"v00000000.run was never completed: it has no MANIFEST.json"):
        trainer.step(1e-5)
    assert m.complete_versions(trainer.root) == []


def test_delta_on_an_unexpected_tensor_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, deltas=True)
    trainer.step(1e-5)
    path = trainer.step(1e-5)
    wrong = m.load_manifest(path)
    wrong.tensors["layer.1"].checksum = "0" * 16
    (path / m.MANIFEST).write_bytes(m.VERSION.encode(wrong))
    with pytest.raises(WeightsError, match=r"tensor layer.1 .* its pieces are applied, the manifest says 0000"):
        stage(path, 1)
    (path / m.MANIFEST).write_bytes(m.VERSION.encode(msgspec.structs.replace(wrong, version=2)))
    with pytest.raises(WeightsError, match="holds version 2, version 1 was requested"):
        stage(path, 1)
