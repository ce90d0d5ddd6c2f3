"""One rank's share of the weight versions of a run: whole, or what changed since the version before.

tensor ──> as the version before has it?  refer to that
      └──> changed in a few elements?     store those (``delta``)
      └──> otherwise                      store it whole
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from realsys.weights.disk import delta
from realsys.weights.disk.delta import Bytes
from realsys.weights.disk.dtypes import as_bytes, dtype_name
from realsys.weights.disk.manifest import ITEM_BYTES
from realsys.weights.disk.records import Piece, ShardInfo, TensorInfo
from realsys.weights.disk.tensor_files import write_safetensors

#: (version folder, file)
_File = tuple[str, str]


@dataclass(slots=True)
class _Tensor:
    """A tensor on its way to disk. ``stored``: the bytes that this version holds of it, a delta if ``base`` is set.

    ``info.pieces`` are those of earlier versions, until the own one is added.
    """

    info: TensorInfo
    data: Bytes
    stored: Bytes | None
    base: str = ""

    def store_whole(self) -> None:
        self.stored, self.base, self.info.pieces = self.data, "", []


@dataclass(slots=True)
class _Share:
    """What was written last of a role: folder name of the version, tensors, their bytes if deltas are to be made.

    ``sizes``: bytes of tensors in each file that the tensors are in.
    """

    folder: str = ""
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    data: dict[str, Bytes] = field(default_factory=dict)
    sizes: dict[_File, int] = field(default_factory=dict)


class ShardWriter:
    """Writes a rank's files. Remembers the checksums of what it wrote last of a role, with ``deltas`` the bytes too.

    ``full_every``: of so many versions in a row that change a tensor, one at least stores it whole. A file of an
    earlier version is referred to only while half of it or more is needed; so what is kept of the past stays small.
    """

    def __init__(self, *, deltas: bool = False, full_every: int = 1) -> None:
        self._deltas, self._full_every = deltas, full_every
        self._last: dict[Path, _Share] = {}

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor], base: str = "") -> ShardInfo:
        """Write ``tensors`` (HF names, any dtype, any device) as one fsynced safetensors file in a ``.tmp`` folder.

        ``base``: folder name of the version that this one may refer to. It does if it is the one written last;
        otherwise all is written. Raises WeightsError naming path and cause (a full disk above all).
        """
        root, folder = path.parent.parent, path.parent.name.removesuffix(".tmp")
        # Taken out: after an error nobody knows what the next version could be based on.
        last = self._last.pop(root, _Share())
        if not base or last.folder != base:
            last = _Share()
        found = {name: self._compare(name, tensor, last) for name, tensor in tensors.items()}
        _let_go_of_old_files(found.values(), last.sizes)
        stored = {name: tensor.stored for name, tensor in found.items() if tensor.stored is not None}
        layout = {
            name: ("U8", [data.size], data.size)
            if found[name].base
            else (found[name].info.dtype, found[name].info.shape, data.size)
            for name, data in stored.items()
        }
        file, starts = write_safetensors(path, layout, stored.__getitem__)
        for name, data in stored.items():
            tensor = found[name]
            checksum = xxhash.xxh3_64_hexdigest(data.data) if tensor.base else tensor.info.checksum
            tensor.info.pieces.append(Piece(path.name, starts[name], data.size, checksum, tensor.base, folder))
        share = _Share(folder, {name: tensor.info for name, tensor in found.items()})
        sizes = last.sizes | {(folder, path.name): sum(data.size for data in stored.values())}
        share.sizes = {key: sizes[key] for key in _bytes_needed(found.values())}
        if self._deltas:
            for name, tensor in found.items():
                share.data[name] = _remembered(tensor, tensors[name], last.data.get(name))
        self._last[root] = share
        return ShardInfo(file.file, file.size, file.checksum, share.tensors)

    def _compare(self, name: str, tensor: torch.Tensor, last: _Share) -> _Tensor:
        data = as_bytes(tensor)
        info = TensorInfo(dtype_name(name, tensor), list(tensor.shape), xxhash.xxh3_64_hexdigest(data.data), [])
        found, before = _Tensor(info, data, data), last.tensors.get(name)
        if before is None or (before.dtype, before.shape) != (info.dtype, info.shape):
            return found
        if before.checksum == info.checksum:
            found.stored, info.pieces = None, list(before.pieces)
        elif name in last.data and len(before.pieces) < self._full_every:
            changes = delta.encode(last.data[name], data, ITEM_BYTES[info.dtype])
            if changes is not None:
                found.stored, found.base, info.pieces = changes, before.checksum, list(before.pieces)
        return found


def _let_go_of_old_files(tensors: Collection[_Tensor], sizes: Mapping[_File, int]) -> None:
    """Store whole what would keep a file of an earlier version of which less than half is needed."""
    while True:
        needed = _bytes_needed(tensors)
        idle = {file for file, count in needed.items() if 2 * count < sizes[file]}
        if not idle:
            return
        for tensor in tensors:
            if any((piece.folder, piece.file) in idle for piece in tensor.info.pieces):
                tensor.store_whole()


def _bytes_needed(tensors: Collection[_Tensor]) -> Counter[_File]:
    needed: Counter[_File] = Counter()
    for tensor in tensors:
        for piece in tensor.info.pieces:
            needed[piece.folder, piece.file] += piece.size
    return needed


def _remembered(tensor: _Tensor, source: torch.Tensor, before: Bytes | None) -> Bytes:
    """The tensor's bytes in memory that nobody else changes."""
    if before is not None and before.size == tensor.data.size:
        if tensor.stored is not None:
            before[:] = tensor.data
        return before
    mine = source.device.type != "cpu" or not source.is_contiguous()
    return tensor.data if mine else tensor.data.copy()
