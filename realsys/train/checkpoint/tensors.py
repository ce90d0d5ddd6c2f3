"""The tensors of a checkpoint, whatever the layout: which part of a whole tensor a rank holds, and how parts are read.

A rank's shard of a parameter is a list of *boxes* of the whole tensor, one below the other along dimension 0: one box,
or two where gate and up share a matrix. What is written is a *piece*: a range of a flattened box, because a rank of the
distributed optimizer owns a range of the flattened shard. To read, any part is put together from all pieces that reach
into it, so the layout that wrote does not matter to the one that reads. No communication anywhere.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
import xxhash

from realsys.errors import CheckpointError
from realsys.train.checkpoint.checkpoint_files import FileInfo, Piece, RankIndex, data_file, rank_stem

Shape = tuple[int, ...]

#: safetensors' names of the types that are written
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}
_ITEM_BYTES = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in _DTYPES}


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a whole tensor."""

    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Elements per index of dimension 0."""
        return math.prod(self.shape[1:])

    def rows(self, first: int, last: int) -> Box:
        """Rows ``[first, last)`` of this box."""
        return Box((self.offset[0] + first, *self.offset[1:]), (last - first, *self.shape[1:]))

    def overlap(self, other: Box) -> Box | None:
        offset = tuple(map(max, self.offset, other.offset))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - begin for begin, end in zip(offset, ends, strict=True))
        return Box(offset, shape) if min(shape) > 0 else None

    def within(self, other: Box) -> tuple[slice, ...]:
        """Where this box lies in ``other``, which contains it."""
        begins = (a - b for a, b in zip(self.offset, other.offset, strict=True))
        return tuple(slice(begin, begin + size) for begin, size in zip(begins, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank holds of the tensor ``name``, whose whole shape is ``whole``: ``boxes``, one below the other."""

    name: str
    whole: Shape
    boxes: tuple[Box, ...]

    @property
    def numel(self) -> int:
        return sum(box.numel for box in self.boxes)

    def ranges(self, start: int, stop: int) -> Iterator[tuple[Box, int, int]]:
        """``[start, stop)`` of the flattened shard, cut into (box, start, stop) of flattened boxes."""
        begin = 0
        for box in self.boxes:
            low, high = max(start - begin, 0), min(stop - begin, box.numel)
            if low < high:
                yield box, low, high
            begin += box.numel


def whole_shard(name: str, shape: Shape) -> Shard:
    """A tensor that every rank holds whole."""
    return Shard(name, shape, (Box((0,) * len(shape), shape),))


def split_shard(name: str, shape: Shape, dim: int, rank: int, ranks: int, stacked: int = 1) -> Shard:
    """The shard (of local ``shape``) of tensor rank ``rank`` of ``ranks`` that split ``dim``.

    ``stacked``: matrices that stand one below the other in the whole tensor, each of them split by itself.
    """
    if ranks == 1:
        return whole_shard(name, shape)
    whole = tuple(size * ranks if axis == dim else size for axis, size in enumerate(shape))
    size = shape[dim] // stacked
    boxes = []
    for matrix in range(stacked):
        begin = matrix * (whole[dim] // stacked) + rank * size
        offset = tuple(begin if axis == dim else 0 for axis in range(len(shape)))
        boxes.append(Box(offset, tuple(size if axis == dim else n for axis, n in enumerate(shape))))
    return Shard(name, whole, tuple(boxes))


# ---- write


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy in host memory of one piece: ``data`` [n] is ``box``, flattened, from ``start`` on."""

    kind: str
    name: str
    whole: Shape
    box: Box
    start: int
    data: torch.Tensor

    def piece(self, position: int, size: int, checksum: str) -> Piece:
        return Piece(
            self.kind,
            self.name,
            self.whole,
            self.box.offset,
            self.box.shape,
            self.start,
            self.start + self.data.numel(),
            str(self.data.dtype).removeprefix("torch."),
            position,
            size,
            checksum,
        )


def snapshot(kind: str, shard: Shard, flat: torch.Tensor, start: int = 0) -> Iterator[Snapshot]:
    """Copies of ``flat`` [n], which is the flattened shard from ``start`` on."""
    begin = 0
    for box, low, high in shard.ranges(start, start + flat.numel()):
        data = flat[begin : begin + high - low].detach().to("cpu", copy=True)
        yield Snapshot(kind, shard.name, shard.whole, box, low, data)
        begin += high - low


def write_tensors(path: Path, snapshots: Sequence[Snapshot]) -> tuple[FileInfo, list[Piece]]:
    """Write one safetensors file, tensor by tensor, and sync it. Raises OSError."""
    header = _safetensors_header(snapshots)
    digest = xxhash.xxh3_64(header)
    pieces, position = [], len(header)
    with _durable(path) as file:
        file.write(header)
        for entry in snapshots:
            content = entry.data.view(torch.uint8).numpy().data
            file.write(content)
            digest.update(content)
            pieces.append(entry.piece(position, len(content), xxhash.xxh3_64_hexdigest(content)))
            position += len(content)
    return FileInfo(position, digest.hexdigest()), pieces


def write_bytes(path: Path, data: bytes) -> None:
    """Write one file and sync it. Raises OSError."""
    with _durable(path) as file:
        file.write(data)


@contextlib.contextmanager
def _durable(path: Path) -> Iterator[BinaryIO]:
    """A new file, synced when the block is left without an error."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _safetensors_header(snapshots: Iterable[Snapshot]) -> bytes:
    """Flat tensors under ``{number}/{kind}/{name}``, for tools that look into the file; we go by the pieces."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for number, entry in enumerate(snapshots):
        end = position + entry.data.numel() * entry.data.element_size()
        entries[f"{number}/{entry.kind}/{entry.name}"] = {
            "dtype": _DTYPES[entry.data.dtype],
            "shape": [entry.data.numel()],
            "data_offsets": [position, end],
        }
        position = end
    body = msgspec.json.encode(entries)
    body += b" " * (-len(body) % 8)  # the format wants the tensors aligned
    return len(body).to_bytes(8, "little") + body


# ---- read


def check_piece(path: Path, piece: Piece, size: int) -> None:
    """Raises CheckpointError unless this could be a piece of a file of ``size`` bytes."""
    shapes = (piece.whole, piece.offset, piece.shape)
    fits = len({len(shape) for shape in shapes}) == 1 and all(
        0 <= offset <= offset + length <= whole for whole, offset, length in zip(*shapes, strict=True)
    )
    if (
        not (fits and piece.dtype in _ITEM_BYTES)
        or not 0 <= piece.start <= piece.stop <= math.prod(piece.shape)
        or piece.size != (piece.stop - piece.start) * _ITEM_BYTES[piece.dtype]
        or not 0 <= piece.position <= size - piece.size
    ):
        raise CheckpointError(f"{path}: its index is of no such file: {piece}; use an older checkpoint")


class PieceReader:
    """Any part of any tensor of one role, from the files of all ranks that wrote it. Use as a context manager.

    A piece is checked against its checksum as it is read, in the very bytes that are used.
    """

    def __init__(self, directory: Path, indexes: Iterable[RankIndex]) -> None:
        self._directory = directory
        self._boxes: dict[tuple[str, str], dict[Box, list[tuple[Path, Piece]]]] = {}
        self._kinds: dict[str, dict[str, Shape]] = {}
        for index in indexes:
            path = directory / data_file(rank_stem(index.role, index.rank, index.layout.world_size))
            for piece in index.pieces:
                check_piece(path, piece, index.file.size)
                boxes = self._boxes.setdefault((piece.kind, piece.name), {})
                boxes.setdefault(Box(piece.offset, piece.shape), []).append((path, piece))
                self._kinds.setdefault(piece.name, {})[piece.kind] = piece.whole
        self._files: dict[Path, BinaryIO] = {}
        self._stack = contextlib.ExitStack()
        self._last: tuple[Piece, torch.Tensor] | None = None

    def __enter__(self) -> PieceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def kinds(self, name: str) -> dict[str, Shape]:
        """What there is of a parameter, itself and its optimizer states, with the shape of the whole tensor."""
        return self._kinds.get(name, {})

    def read(self, kind: str, shard: Shard, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """``[start, stop)`` of the flattened shard, in the type it was written in, on the CPU.

        Raises CheckpointError when a file is damaged, or no rank wrote some of it.
        """
        end = shard.numel if stop is None else stop
        parts = [self._read_box(kind, shard.name, *part) for part in shard.ranges(start, end)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_box(self, kind: str, name: str, box: Box, start: int, stop: int) -> torch.Tensor:
        """``[start, stop)`` of the flattened box: the rows that it touches, from every box that reaches into them."""
        first, last = start // box.row, -(-stop // box.row)
        rows, filled = box.rows(first, last), 0
        out: torch.Tensor | None = None
        for source, pieces in self._boxes.get((kind, name), {}).items():
            overlap = rows.overlap(source)
            if overlap is None:
                continue
            top = overlap.offset[0] - source.offset[0]
            found = source.rows(top, top + overlap.shape[0])
            block = self._read_flat(pieces, top * source.row, (top + overlap.shape[0]) * source.row)
            if out is None:
                out = torch.empty(rows.shape, dtype=block.dtype)
            out[overlap.within(rows)] = block.view(found.shape)[overlap.within(found)]
            filled += overlap.numel
        if out is None or filled != rows.numel:
            raise self._incomplete(kind, name, filled, rows.numel)
        return out.flatten()[start - first * box.row : stop - first * box.row]

    def _read_flat(self, pieces: Sequence[tuple[Path, Piece]], start: int, stop: int) -> torch.Tensor:
        """``[start, stop)`` of one flattened box that was written in ``pieces``."""
        out: torch.Tensor | None = None
        filled = 0
        for path, piece in pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low >= high:
                continue
            content = self._load(path, piece)
            if out is None:
                out = torch.empty(stop - start, dtype=content.dtype)
            out[low - start : high - start] = content[low - piece.start : high - piece.start]
            filled += high - low
        if out is None or filled != stop - start:
            raise self._incomplete(pieces[0][1].kind, pieces[0][1].name, filled, stop - start)
        return out

    def _incomplete(self, kind: str, name: str, found: int, wanted: int) -> CheckpointError:
        return CheckpointError(f"{self._directory}: {name} ({kind}) is not complete: {found} of {wanted} found")

    def _load(self, path: Path, piece: Piece) -> torch.Tensor:
        """The flat content of a piece. The last one is kept: gate and up of a reader may come from one."""
        if self._last is not None and self._last[0] is piece:
            return self._last[1]
        if path not in self._files:
            try:
                self._files[path] = self._stack.enter_context(path.open("rb"))
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}; use an older checkpoint") from None
        file, content = self._files[path], bytearray(piece.size)
        file.seek(piece.position)
        if file.readinto(content) != piece.size or xxhash.xxh3_64_hexdigest(content) != piece.checksum:  # type: ignore[attr-defined]
            raise CheckpointError(
                f"{path} is corrupt: {piece.name} ({piece.kind}) is not what was written; use an older checkpoint"
            )
        tensor = torch.frombuffer(content, dtype=getattr(torch, piece.dtype))
        self._last = (piece, tensor)
        return tensor
