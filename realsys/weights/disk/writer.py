"""Writer of one rank's share of the weight versions of a run: whole, or the changes since the version before.

tensor ──> equal to the one of the version before?  refer to its pieces
      └──> changed in a few elements?               store those (``delta``)
      └──> otherwise                                store it whole

A tensor with an adapter refers to the frozen tensor under it, which is stored once, and the adapter is stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import msgspec
import torch
import xxhash

from realsys.cluster.commit_folder import TEMPORARY
from realsys.cluster.failpoint import failpoint
from realsys.cluster.lease import CheckAlive, unleased
from realsys.weights.contract import Share
from realsys.weights.disk import delta
from realsys.weights.disk.delta import Bytes
from realsys.weights.disk.dtypes import as_bytes, dtype_name
from realsys.weights.disk.manifest import ITEM_BYTES, DiskPlan, ShardInfo, StoredPiece, TensorInfo
from realsys.weights.disk.plain_folders import write_safetensors
from realsys.weights.low_rank import AdaptedTensors

_ADAPTER = ".adapter"  # ending of the name under which an adapter is in a file
#: (version folder, file)
_File = tuple[str, str]


class DiskWriter:
    """Writer of one rank's file. Its report lists the written shard; it is empty without tensors."""

    def __init__(self, files: ShardWriter, check_alive: CheckAlive = unleased) -> None:
        self._files = files
        self._check_alive = check_alive

    def write(self, share: Share, tensors: Mapping[str, torch.Tensor]) -> list[ShardInfo]:
        """Write the file into the plan's folder, fsynced. Raises WeightsError, which names path and
        cause."""
        plan = msgspec.convert(share.plan, DiskPlan)
        # Numbered over all ranks of the mesh: a rank does not know which others have nothing to write.
        file = Path(plan.directory) / f"model-{share.rank + 1:05d}-of-{share.ranks:05d}.safetensors"
        self._check_alive()
        shards = [self._files.write(file, tensors, plan.base, share.checksums)] if tensors else []
        failpoint("weights.shard", file)
        return shards


class ShardWriter:
    """Writes a rank's files. It remembers the checksums of its last share of a role; with ``deltas`` also the bytes.

    ``full_every``: a tensor is stored whole at least once in this many versions that change it. A file of
    an earlier version is referred to only while at least half of it is needed, so few old files are kept.
    """

    def __init__(self, *, deltas: bool = False, full_every: int = 1) -> None:
        self._deltas = deltas
        self._full_every = full_every
        self._last: dict[Path, _LastShare] = {}

    def write(
        self,
        path: Path,
        tensors: Mapping[str, torch.Tensor],
        base: str = "",
        checksums: Mapping[str, str] = MappingProxyType({}),
    ) -> ShardInfo:
        """Write ``tensors`` (HF names, any dtype, any device) as one fsynced safetensors file in a ``.tmp`` folder.

        ``base``: folder name of the version that this one may refer to. If this writer did not write it
        last, everything is stored. ``checksums``: of the tensors for which they are known; all of them if the share
        has adapters. Raises WeightsError, which names path and cause (such as a full disk).
        """
        root = path.parent.parent
        folder = path.parent.name.removesuffix(TEMPORARY)
        # Removed first: after an error the file is unknown, and the next version must not refer to it.
        last = self._last.pop(root, _LastShare())
        if not base or last.folder != base:
            last = _LastShare()
        adapted, served = (tensors, checksums) if isinstance(tensors, AdaptedTensors) else (None, checksums)
        if adapted is not None:
            tensors, checksums = _with_adapters(adapted, served)
        written = {name: self._compare(name, tensor, last, checksums.get(name)) for name, tensor in tensors.items()}
        _drop_old_files(written.values(), last.sizes)
        stored = {name: tensor.stored for name, tensor in written.items() if tensor.stored is not None}
        layout = {
            name: ("U8", [data.size], data.size)
            if written[name].base
            else (written[name].info.dtype, written[name].info.shape, data.size)
            for name, data in stored.items()
        }
        file, starts = write_safetensors(path, layout, stored.__getitem__)
        for name, data in stored.items():
            tensor = written[name]
            checksum = xxhash.xxh3_64_hexdigest(data.data) if tensor.base else tensor.info.checksum
            tensor.info.pieces.append(StoredPiece(path.name, starts[name], data.size, checksum, tensor.base, folder))
        share = _LastShare(folder, {name: tensor.info for name, tensor in written.items()})
        sizes = last.sizes | {(folder, path.name): sum(data.size for data in stored.values())}
        share.sizes = {key: sizes[key] for key in _bytes_needed(written.values())}
        if self._deltas and adapted is None:
            for name, tensor in written.items():
                share.data[name] = _remembered(tensor, tensors[name], last.data.get(name))
        self._last[root] = share
        infos = share.tensors if adapted is None else _served(adapted, share.tensors, served)
        return ShardInfo(path.name, file.size, file.checksum, infos)

    def _compare(self, name: str, tensor: torch.Tensor, last: _LastShare, checksum: str | None) -> _Tensor:
        data = as_bytes(tensor)
        checksum = checksum or xxhash.xxh3_64_hexdigest(data.data)
        info = TensorInfo(dtype_name(name, tensor), list(tensor.shape), checksum, [])
        compared = _Tensor(info, data, data)
        before = last.tensors.get(name)
        if before is None or (before.dtype, before.shape) != (info.dtype, info.shape):
            return compared
        if before.checksum == info.checksum:
            compared.stored = None
            info.pieces = list(before.pieces)
        elif name in last.data and len(before.pieces) < self._full_every:
            changes = delta.encode(last.data[name], data, ITEM_BYTES[info.dtype])
            if changes is not None:
                compared.stored = changes
                compared.base = before.checksum
                info.pieces = list(before.pieces)
        return compared


@dataclass(slots=True)
class _LastShare:
    """The last written share of a role.

    folder  folder name of the version
    data    bytes of the tensors, if deltas are made
    sizes   bytes of tensors in each file that the tensors refer to
    """

    folder: str = ""
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    data: dict[str, Bytes] = field(default_factory=dict)
    sizes: dict[_File, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Tensor:
    """A tensor to be written.

    stored       bytes that this version stores of it: a delta if ``base`` is set; None: nothing
    info.pieces  the pieces of earlier versions, until the piece of this version is added
    """

    info: TensorInfo
    data: Bytes
    stored: Bytes | None
    base: str = ""

    def store_whole(self) -> None:
        """Store the whole tensor, and refer to no earlier version."""
        self.stored = self.data
        self.base = ""
        self.info.pieces = []


def _with_adapters(
    share: AdaptedTensors, checksums: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors to be stored for a share with adapters, and their checksums as far as they are known.

    ``checksums``: of the merged tensors.
    """
    stored, known = dict(share.frozen), dict(share.checksums)
    for name, factors in share.factors.items():
        if checksums[name] == share.checksums[name]:
            continue  # B is 0
        if factors.nbytes < share.frozen[name].nbytes:
            stored[name + _ADAPTER] = factors
        else:
            stored[name], known[name] = share[name], checksums[name]
    return stored, known


def _served(
    share: AdaptedTensors, stored: Mapping[str, TensorInfo], checksums: Mapping[str, str]
) -> dict[str, TensorInfo]:
    """Return the tensors that servers make from the stored ones."""
    infos: dict[str, TensorInfo] = {}
    for name in share:
        infos[name] = info = stored[name]
        if name + _ADAPTER in stored:
            [factors] = stored[name + _ADAPTER].pieces
            change = msgspec.structs.replace(factors, base=info.checksum, rank=share.rank, scale=share.scale)
            pieces = [*info.pieces, change]
            infos[name] = msgspec.structs.replace(info, checksum=checksums[name], pieces=pieces)
    return infos


def _drop_old_files(tensors: Collection[_Tensor], sizes: Mapping[_File, int]) -> None:
    """Store tensors whole whose earlier file is needed less than half: it can then be pruned."""
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
    """Return the tensor's bytes in memory that the trainer does not change."""
    if before is not None and before.size == tensor.data.size:
        if tensor.stored is not None:
            before[:] = tensor.data
        return before
    # as_bytes() returns the parameter's own memory if it can; the next optimizer step changes that.
    copied = source.device.type != "cpu" or not source.is_contiguous()
    return tensor.data if copied else tensor.data.copy()
