"""Versions of a trainer with low-rank adapters: each holds the adapters, and refers to the first one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from realsys.errors import WeightsError
from realsys.train.master.publish import Publisher, VersionKey
from realsys.train.requests import SaveWeightsReply, SaveWeightsRequest
from realsys.train.worker.weight_saver import checksums_of
from realsys.weights import memory
from realsys.weights.contract import PublisherParts, Share, Transport, WriterParts, build_transport
from realsys.weights.disk import manifest as m
from realsys.weights.disk.manifest import load_manifest
from realsys.weights.disk.writer import ShardWriter
from realsys.weights.group import GroupReader
from realsys.weights.host_copies import SharedCopies
from realsys.weights.host_reader import HostReader
from realsys.weights.low_rank import AdaptedTensors, factors_of, merged
from tests.support.processes.config_trees import changed
from tests.support.streams.weight_ranks import WeightRanks
from tests.support.streams.weight_trials import BOUND_S, Trial

RANK, SCALE = 2, 1.5
TRANSPORTS = ("disk", "memory", "group")


# ---- merge


def drawn(rows: int, columns: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """A weight with A and B, whose numbers are of very different sizes."""
    random = torch.Generator().manual_seed(rank)
    shapes = [(rows, columns), (rank, columns), (rows, rank)]
    base, a, b = (torch.randn(shape, generator=random) * 0.1 for shape in shapes)
    b *= 10.0 ** torch.randint(-6, 3, b.shape, generator=random)
    b[0], a[:, 0] = 0, 0
    return base.to(dtype), a.to(dtype), b.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rank", [1, 3, 16, 33])
def test_merge_has_the_same_bits_for_slices_and_threads(rank: int, dtype: torch.dtype) -> None:
    base, a, b = drawn(700, 600, rank, dtype)
    whole = merged(base, a, b, SCALE)
    rows = torch.cat([merged(base[i : i + 7], a, b[i : i + 7], SCALE) for i in range(0, 700, 7)])
    columns = torch.cat([merged(base[:, i : i + 150], a[:, i : i + 150], b, SCALE) for i in range(0, 600, 150)], 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    again = merged(base, a, b, SCALE)
    torch.set_num_threads(threads)
    assert all(torch.equal(found, whole) for found in (rows, columns, again))
    assert torch.equal(whole[0], base[0]) and torch.equal(whole[:, 0], base[:, 0])
    usual = base.float() + (b.float() @ a.float()) * SCALE
    torch.testing.assert_close(whole, usual.to(dtype), rtol=2**-7 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)


def test_merge_is_as_documented() -> None:
    """With 26 bits for rank 1, 24 for rank 16; one rounding to fp64 after the product, one after the sum, then fp32."""
    for rank in (1, 16):
        base, a, b = drawn(5, 6, rank, torch.float32)
        bits = {1: 26, 16: 24}[rank]

        def integers(values: list[float], bits: int = bits) -> tuple[list[int], Fraction]:
            largest = max(map(abs, values))
            unit = Fraction(2) ** ((math.frexp(largest)[1] if largest else 0) - bits)
            return [round(Fraction(value) / unit) for value in values], unit

        found = merged(base, a, b, 2 / 3)
        for row in range(5):
            left, left_unit = integers(b[row].tolist())
            for column in range(6):
                right, right_unit = integers(a[:, column].tolist())
                product = sum(x * y for x, y in zip(left, right, strict=True))
                change = float(product) * (2 / 3 * float(left_unit)) * float(right_unit)
                expected = np.float32(change + float(base[row, column]))
                assert found[row, column].item() == expected


# ---- versions


class AdapterTrial(Trial):
    """Two ranks that train adapters of the model's matrices: B is 0 in version 0, unless ``trained`` is set."""

    def __init__(self, tmp_path: Path, transport: Transport, token: str | None = None) -> None:
        super().__init__(tmp_path, transport, token)
        self.trained = False
        self._shares = [self._frozen(rank) for rank in (0, 1)]

    def _frozen(self, rank: int) -> AdaptedTensors:
        return AdaptedTensors(dict(list(self.base.items())[rank::2]), {}, {}, RANK, SCALE)

    def share(self, version: int, rank: int) -> AdaptedTensors:
        random = torch.Generator().manual_seed(version)
        frozen = self._shares[rank].frozen
        self._shares[rank].factors = {
            name: self._adapter(weight, version, random) for name, weight in frozen.items() if "proj.weight" in name
        }
        return self._shares[rank]

    def _adapter(self, weight: torch.Tensor, version: int, random: torch.Generator) -> torch.Tensor:
        a, b = (torch.randn(shape, generator=random) for shape in ((RANK, weight.shape[1]), (len(weight), RANK)))
        return factors_of(a, b * 0.1 * (version > 0 or self.trained)).to(weight.dtype)

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        return {name: tensor for rank in (0, 1) for name, tensor in self.share(version, rank).items()}

    async def _save(self, request: SaveWeightsRequest) -> list[SaveWeightsReply]:
        plan = msgspec.to_builtins(request.plan)
        replies = []
        for rank, writer in enumerate(self.writers):
            share = self.share(request.version, rank)
            order = Share(request.role, request.version, rank, 2, plan, checksums_of(share))
            replies.append(SaveWeightsReply(msgspec.to_builtins(writer.write(order, share))))
        return replies

    def restart(self, incarnation: str) -> None:
        """Let the next trainer go on from a checkpoint."""
        parts = [WriterParts(worker, trial=self.parts.trial, token=self.parts.token) for worker in (0, 1)]
        self.writers = [self.transport.writer(part) for part in parts]
        self.weights = self.transport.publisher(PublisherParts(self.root, self.model, incarnation))
        name, key = self.transport.config.weights.transport, VersionKey(self.store, "newest")
        self.publisher = Publisher(self.weights, WeightRanks(self._save), key, incarnation=incarnation, transport=name)
        self.trained = True

    def check(self, version: int, found: dict[str, torch.Tensor]) -> None:
        expected = self.tensors(version)
        assert found.keys() == expected.keys()
        assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def server(trial: Trial, place: Path) -> HostReader:
    """A server on the host whose memory is ``place``."""
    place.mkdir(exist_ok=True)
    return HostReader(SharedCopies(trial.parts.trial, trial.model, [place], token=trial.parts.token))


@pytest.fixture(params=TRANSPORTS)
def trial(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdapterTrial]:
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(memory, "places", lambda: [tmp_path / "memory"])
    made = AdapterTrial(tmp_path, build_transport(changed(f"weights.transport={request.param}")), token="secret")
    yield made
    for writer in made.writers:
        if getattr(writer, "_home", None) is not None:
            writer._http.close()
    made.store.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[AdapterTrial]:
    made = AdapterTrial(tmp_path, build_transport(changed("weights.transport=disk")))
    yield made
    made.store.close()


def written(locator: str) -> int:
    return sum(info.size for info in load_manifest(Path(locator)).files.values())


def flip(folder: Path, back: int = 10) -> str:
    """Change one bit of the second rank's file; returns its path in the error."""
    [file] = folder.glob("model-00002*")
    content = np.memmap(file, np.uint8, "r+")
    content[-back] ^= 4
    return f"{folder.name}/{file.name}"


def test_versions_hold_adapters_and_are_served_as_trained(trial: AdapterTrial, tmp_path: Path) -> None:
    """Each refers to the first version alone. The server's host holds the frozen weights, and reads adapters only."""
    first = trial.publish(0)
    assert not load_manifest(Path(first.locator)).needs
    assert (Path(first.locator) / m.INDEX).exists()  # a plain model
    with closing(server(trial, tmp_path / "shm")) as reader:
        trial.check(0, reader.stage(first.locator, 0).tensors)
        reader.release()
        for version in range(1, 6):
            locator = trial.publish(version).locator
            assert load_manifest(Path(locator)).needs == [Path(first.locator).name]
            staged = reader.stage(locator, version)
            trial.check(version, staged.tensors)
            reader.release()
            adapters = sum(factors.nbytes for rank in (0, 1) for factors in trial.share(version, rank).factors.values())
            assert staged.counts["bytes_read"] == adapters
            assert adapters < written(locator) < adapters + 8000  # headers of two small files
            assert staged.counts["changed"] == len(trial.share(version, 0).factors) + len(
                trial.share(version, 1).factors
            )
    assert not list((tmp_path / "shm").iterdir())  # the last server has removed the frozen weights, too


def test_reader_reads_any_version_beside_the_staged_one(trial: AdapterTrial, tmp_path: Path) -> None:
    """Verified, in memory of its own: the version that is staged and its memory stay."""
    locators = [trial.publish(version).locator for version in range(3)]
    with closing(server(trial, tmp_path / "shm")) as reader:
        staged = reader.stage(locators[2], 2)
        for version in (1, 0, 2):
            trial.check(version, reader.read(locators[version], version).tensors)
        trial.check(2, staged.tensors)
        file = flip(Path(locators[1]))
        with pytest.raises(WeightsError, match=f"{file}: the bytes of tensor .* corrupt"):
            reader.read(locators[1], 1)
        with pytest.raises(WeightsError, match="holds version 1, version 2 was requested"):
            reader.read(locators[1], 2)
        reader.release()
        trial.check(3, reader.stage(trial.publish(3).locator, 3).tensors)


def test_engine_keeps_its_version_until_the_adapter_is_repaired(trial: AdapterTrial) -> None:
    with trial.engine() as engine:
        assert engine.update(trial.publish(0).locator, 0).result(BOUND_S).success
        locator = trial.publish(1).locator
        file = flip(Path(locator))
        result = engine.update(locator, 1).result(BOUND_S)
        assert not result.success and file in result.message and "corrupt" in result.message
        assert engine.version == 0
        asyncio.run(trial.publisher.repair({"version": 1, "servers": [{"failures": 1, "version": None}]}))
        assert engine.update(locator, 1).result(BOUND_S).success
        assert not load_manifest(Path(locator)).needs  # it was written whole, and is what the next one refers to
        following = trial.publish(2).locator
        assert load_manifest(Path(following)).needs == [Path(locator).name]
        assert engine.update(following, 2).result(BOUND_S).success


def test_late_server_reads_the_first_version_too(trial: AdapterTrial, tmp_path: Path) -> None:
    size = sum(tensor.nbytes for tensor in trial.base.values())
    for version in range(4):
        locator = trial.publish(version).locator
    with closing(server(trial, tmp_path / "shm")) as reader:
        staged = reader.stage(locator, 3)
        trial.check(3, staged.tensors)
        assert staged.counts["bytes_read"] > size
        reader.release()
        staged = reader.stage(trial.publish(4).locator, 4)
        trial.check(4, staged.tensors)
        assert staged.counts["bytes_read"] < size / 4
        with closing(server(trial, tmp_path / "shm")) as neighbour:  # of the same host
            assert neighbour.stage(str(locator).replace("v00000003", "v00000004"), 4).counts["bytes_read"] == 0


def test_damage_of_the_first_version_is_named(disk: AdapterTrial, tmp_path: Path) -> None:
    """A host that has its weights goes on; one that joins late refuses the version, until it is repaired."""
    first = Path(disk.publish(0).locator)
    with closing(server(disk, tmp_path / "a")) as early, closing(server(disk, tmp_path / "b")) as late:
        early.stage(str(first), 0)
        early.release()
        early.stage(disk.publish(1).locator, 1)
        early.release()
        file = flip(first)
        locator = disk.publish(2).locator
        disk.check(2, early.stage(locator, 2).tensors)
        early.release()
        with pytest.raises(WeightsError, match=f"{file}: the bytes of tensor .* corrupt"):
            late.stage(locator, 2)
        with pytest.raises(WeightsError, match="corrupt"):
            disk.weights.verify(locator, 2)
        asyncio.run(disk.publisher.repair({"version": 2, "servers": [{"failures": 1, "version": None}]}))
        disk.check(2, late.stage(locator, 2).tensors)
        late.release()
        disk.check(3, late.stage(disk.publish(3).locator, 3).tensors)


def test_other_host_fetches_adapters_from_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(memory, "places", lambda: [tmp_path / "memory"])
    trial = AdapterTrial(tmp_path, build_transport(changed("weights.transport=memory")), token="secret")
    with closing(server(trial, tmp_path / "shm")) as reader:
        fetched = []
        for version in range(3):
            locator = trial.publish(version).locator
            for link in (path for path in trial.root.glob("*/model-*") if path.is_symlink()):
                target = link.readlink()
                link.unlink()
                link.symlink_to(f"/of-another-host{target}")
            staged = reader.stage(locator, version)
            trial.check(version, staged.tensors)
            reader.release()
            fetched.append(staged.counts["bytes_fetched"])
    assert fetched[0] == sum(tensor.nbytes for tensor in trial.base.values())
    assert fetched[1] == fetched[2] < fetched[0] / 4
    for writer in trial.writers:
        writer._http.close()
    trial.store.close()


def test_first_version_stays_while_it_is_needed(trial: AdapterTrial) -> None:
    for version in range(7):
        trial.publish(version)
    kept = sorted(int(path.name[1:9]) for path in trial.root.iterdir())
    assert kept[0] == 0 and kept[-1] == 6 and len(kept) == trial.transport.config.weights.keep_versions + 1


def test_next_trainer_writes_everything_first(trial: AdapterTrial, tmp_path: Path) -> None:
    """Its first version has the frozen weights and adapters; a host that knows these weights does not read them."""
    with closing(server(trial, tmp_path / "shm")) as reader:
        for version in range(3):
            reader.stage(trial.publish(version).locator, version)
            reader.release()
        for writer in trial.writers:
            if getattr(writer, "_home", None) is not None:
                writer._http.close()
        trial.restart("0002")
        locator = trial.publish(1).locator
        manifest = load_manifest(Path(locator))
        assert not manifest.needs and all(name.endswith(".part") for name in manifest.files)
        assert written(locator) > sum(tensor.nbytes for tensor in trial.base.values())
        staged = reader.stage(locator, 1)
        trial.check(1, staged.tensors)
        assert staged.counts["bytes_read"] < staged.counts["bytes"] / 4
        reader.release()
        following = trial.publish(2).locator
        assert load_manifest(Path(following)).needs == [Path(locator).name]
        trial.check(2, reader.stage(following, 2).tensors)


def test_export_is_a_plain_model(trial: AdapterTrial, tmp_path: Path) -> None:
    for version in range(3):
        locator = trial.publish(version).locator
    trial.weights.export(locator, 2, tmp_path / "plain")
    found = {name: t for file in (tmp_path / "plain").glob("*.safetensors") for name, t in load_file(file).items()}
    trial.check(2, found)


def test_host_without_room_reads_everything_again(
    disk: AdapterTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    new_draft = SharedCopies._new_draft

    def full(self: SharedCopies, version: int, name: str, *more: Any) -> Any:
        if name.startswith("frozen-"):
            raise WeightsError("no room on this host")
        return new_draft(self, version, name, *more)

    monkeypatch.setattr(SharedCopies, "_new_draft", full)
    with closing(server(disk, tmp_path / "shm")) as reader:
        for version in range(3):
            staged = reader.stage(disk.publish(version).locator, version)
            disk.check(version, staged.tensors)
            reader.release()
    assert staged.counts["bytes_read"] > staged.counts["bytes"] / 2
    assert "are read again for each version: no room" in caplog.text


def test_engine_by_group_stages_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first version is sent to an engine that receives; the next ones are merged on its host."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(memory, "places", lambda: [tmp_path / "memory"])
    trial = AdapterTrial(tmp_path, build_transport(changed("weights.transport=group")), token="secret")
    reader = trial.transport.reader(trial.parts)
    assert isinstance(reader, GroupReader)
    assert reader.senders(trial.publish(0).locator, 0, loaded=False) is not None
    locator = trial.publish(1).locator
    assert reader.senders(locator, 1, loaded=True) is None
    trial.check(1, reader.stage(locator, 1, loaded=True).tensors)
    reader.close()
    for writer in trial.writers:
        writer._http.close()
    trial.store.close()


# ---- one writer


def publish(root: Path, model: Path, writer: ShardWriter, share: AdaptedTensors, version: int, base: str) -> Path:
    tmp = m.prepare(root, version, "0001")
    shard = writer.write(tmp / "model-00001-of-00001.safetensors", share, base, checksums_of(share))
    return m.commit(tmp, version=version, incarnation="0001", step=version, shards=[shard], model_dir=model)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "weights", tmp_path / "model"


def test_version_of_a_half_billion_model_is_three_percent(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Two layers of a Qwen2.5 of 0.5B parameters with adapters of rank 16 on all matrices, without its embedding."""
    hidden, kv, ffn, rank = 896, 128, 4864, 16
    sizes = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
    sizes |= {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
    frozen = {f"{i}.{name}": (torch.randn(size) * 0.02).bfloat16() for i in range(2) for name, size in sizes.items()}
    share, writer, base = AdaptedTensors(frozen, {}, {}, rank, 1.0), ShardWriter(), ""
    for version in range(3):
        share.factors = {
            name: (torch.randn(rank * sum(weight.shape)) * 0.02).bfloat16() for name, weight in frozen.items()
        }
        path = publish(*folders, writer, share, version, base)
        base = path.name
    size = sum(path.stat().st_size for path in path.iterdir())
    assert size <= 0.03 * sum(weight.nbytes for weight in frozen.values())


def test_unchanged_adapters_are_not_written_again(folders: tuple[Path, Path], tmp_path: Path) -> None:
    frozen = {"w": torch.randn(64, 48), "norm": torch.randn(64)}
    share, writer = AdaptedTensors(frozen, {}, {"w": torch.randn(2 * 112)}, 2, 1.0), ShardWriter()
    base = ""
    for version in range(4):
        if version == 3:
            share.factors = {"w": torch.randn(2 * 112)}
        base = publish(*folders, writer, share, version, base).name
    manifests = [load_manifest(path) for _, _, path in m.complete_versions(folders[0])]
    assert [len(manifest.needs) for manifest in manifests] == [0, 1, 1, 1]
    assert manifests[1].tensors["w"].checksum == manifests[2].tensors["w"].checksum
    assert [piece.folder for piece in manifests[2].tensors["w"].pieces] == ["v00000000.0001"] * 2


def test_adapter_of_half_a_matrix_is_stored_merged(folders: tuple[Path, Path]) -> None:
    share = AdaptedTensors({"w": torch.randn(8, 8), "norm": torch.randn(8)}, {}, {"w": torch.randn(4 * 16)}, 4, 1.0)
    path = publish(*folders, ShardWriter(), share, 0, "")
    [piece] = load_manifest(path).tensors["w"].pieces
    assert not piece.base and torch.equal(load_file(path / piece.file)["w"], share["w"])


@pytest.mark.parametrize(
    "change", [{"rank": 3}, {"rank": -2}, {"scale": math.inf}, {"size": 8}], ids=lambda change: next(iter(change))
)
def test_piece_that_is_no_adapter_is_refused(change: dict[str, Any], folders: tuple[Path, Path]) -> None:
    share = AdaptedTensors({"w": torch.randn(64, 48)}, {}, {"w": torch.randn(2 * 112)}, 2, 1.0)
    path = publish(*folders, ShardWriter(), share, 0, "")
    info = load_manifest(path).tensors["w"]
    info.pieces[1] = msgspec.structs.replace(info.pieces[1], **change)
    with pytest.raises(WeightsError, match="tensor w"):
        m._check_tensor(path, "w", info)
