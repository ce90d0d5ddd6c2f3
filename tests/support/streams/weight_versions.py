"""Versions of the transport ``disk`` in a folder, and readers of them that are servers of one host."""

from __future__ import annotations

from pathlib import Path

import torch

from realsys.weights.disk import manifest as m
from realsys.weights.disk.writer import ShardWriter
from realsys.weights.host_copies import SharedCopies
from realsys.weights.host_reader import HostReader

Tensors = dict[str, torch.Tensor]


class DiskVersions:
    """A trainer of one rank: each version moves ``changing`` matrices a little, ``frozen`` stays as it is."""

    def __init__(self, root: Path, *, deltas: bool = False, elements: int = 6000) -> None:
        self.root = root
        self.model = root / "model"
        self.model.mkdir(parents=True)
        (self.model / "config.json").write_text("{}")
        self.truth: list[Tensors] = []
        self.paths: list[Path] = []
        self._elements = elements
        self._writer = ShardWriter(deltas=deltas, full_every=8)
        self._random = torch.Generator().manual_seed(3)
        self._master = {f"layer.{i}": torch.randn(elements, generator=self._random) * 0.02 for i in range(4)}
        self._frozen = {"embed": torch.randn(elements, generator=self._random).bfloat16(), "scale": torch.ones(3)}

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self.truth[-1].values())

    def publish(self, incarnation: str = "0001", lr: float = 1e-5) -> Path:
        """Write the next version; returns its folder."""
        version = len(self.paths)
        for tensor in self._master.values():
            tensor += lr * torch.randn(tensor.shape, generator=self._random).clamp(-1, 1)
        state = {**self._frozen, **{name: tensor.bfloat16() for name, tensor in self._master.items()}}
        tmp = m.prepare(self.root / "weights", version, incarnation)
        base = self.paths[-1].name if self.paths else ""
        shard = self._writer.write(tmp / "model-00001-of-00001.safetensors", state, base)
        path = m.commit(
            tmp, version=version, incarnation=incarnation, step=version, shards=[shard], model_dir=self.model
        )
        self.truth.append(state)
        self.paths.append(path)
        return path

    def server(self, places: list[Path], silent_s: float = 10.0, token: str | None = None) -> HostReader:
        """Return the reader of a server on the host whose memory is ``places``."""
        return HostReader(SharedCopies(self.root, self.model, places, silent_s, token))

    def check(self, version: int, found: Tensors) -> None:
        assert found.keys() == self.truth[version].keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in self.truth[version].items())
