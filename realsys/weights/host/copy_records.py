"""Format of a copy, and its place in memory. No torch.

A copy is one safetensors file. Its layout follows from the manifest of the version, so a tensor has the same place in
the copies of all hosts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from realsys.cluster.files import TensorEntry, safetensors_header
from realsys.weights.disk.manifest import ITEM_BYTES, Manifest, tensor_bytes

COPY, WEIGHTS, READERS = "COPY.json", "model.safetensors", "readers"


class CopyTensor(msgspec.Struct, frozen=True):
    """A tensor of a copy. ``start``: byte in the file."""

    dtype: str
    shape: list[int]
    checksum: str
    start: int
    size: int


class CopyInfo(msgspec.Struct, frozen=True):
    """Contents of COPY.json. ``boot``: the copy does not outlive this boot of the host, because nothing is synced."""

    boot: str
    version: int
    incarnation: str
    tensors: dict[str, CopyTensor]

    @property
    def age(self) -> tuple[str, int]:
        return self.incarnation, self.version

    def holds(self, manifest: Manifest) -> bool:
        """Return True if this is a copy of the version with ``manifest``."""
        checksums = {name: tensor.checksum for name, tensor in self.tensors.items()}
        wanted = {name: info.checksum for name, info in manifest.tensors.items()}
        return self.age == (manifest.incarnation, manifest.version) and checksums == wanted


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of the file of a copy, in bytes."""

    header: bytes
    tensors: dict[str, CopyTensor]
    size: int

    @classmethod
    def of(cls, manifest: Manifest) -> Layout:
        """Return the layout of a copy of the version with ``manifest``."""
        infos = manifest.tensors
        # Widest elements first: every tensor then begins at a multiple of its element size.
        names = sorted(infos, key=lambda name: (-ITEM_BYTES[infos[name].dtype], name))
        entries = [TensorEntry(name, infos[name].dtype, infos[name].shape, tensor_bytes(infos[name])) for name in names]
        header = safetensors_header(entries)
        tensors, end = {}, len(header)
        for entry in entries:
            info = infos[entry.name]
            tensors[entry.name] = CopyTensor(info.dtype, info.shape, info.checksum, end, entry.size)
            end += entry.size
        return cls(header, tensors, end)

    def fits(self, tensors: dict[str, CopyTensor]) -> bool:
        """Return True if a copy with ``tensors`` has this layout, whatever its values are."""
        return _places(tensors) == _places(self.tensors)


def _places(tensors: dict[str, CopyTensor]) -> Iterable[tuple[object, ...]]:
    return {(name, one.dtype, tuple(one.shape), one.start) for name, one in tensors.items()}
