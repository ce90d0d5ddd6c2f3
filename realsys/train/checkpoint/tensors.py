"""Tensors of a checkpoint in any layout: the part of a tensor that a rank holds, and the reading of parts.

A rank's shard of a parameter is a list of *boxes* of the whole tensor, one below the other along
dimension 0: one box, or two if gate and up share a matrix. A rank writes *pieces*: ranges of a
flattened box, because a rank of the distributed optimizer owns a range of the flattened shard. A reader
assembles any part from all pieces that overlap it, so the layout that reads may differ from the layout
that wrote. Nothing here communicates.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import torch

from realsys.cluster.commit_folder import checksum_of
from realsys.cluster.files import FileInfo, TensorEntry, write_safetensors
from realsys.errors import CheckpointError
from realsys.train.checkpoint.checkpoint_files import CheckpointPiece, RankIndex, data_file, rank_stem

Shape = tuple[int, ...]

#: safetensors' names of the written types
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}
_ITEM_BYTES = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in _DTYPES}


@dataclass(frozen=True, slots=True)
class TensorBox:
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

    def rows(self, first: int, last: int) -> TensorBox:
        """Return the rows ``[first, last)`` of this box."""
        return TensorBox((self.offset[0] + first, *self.offset[1:]), (last - first, *self.shape[1:]))

    def overlap(self, other: TensorBox) -> TensorBox | None:
        """Return the part that both boxes have; None if they have none."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - begin for begin, end in zip(offset, ends, strict=True))
        return TensorBox(offset, shape) if min(shape) > 0 else None

    def within(self, other: TensorBox) -> tuple[slice, ...]:
        """Return the slices that cut this box out of ``other``, which contains it."""
        begins = (a - b for a, b in zip(self.offset, other.offset, strict=True))
        return tuple(slice(begin, begin + size) for begin, size in zip(begins, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A rank's part of the tensor ``name`` of shape ``whole``: ``boxes``, one below the other."""

    name: str
    whole: Shape
    boxes: tuple[TensorBox, ...]

    @property
    def numel(self) -> int:
        return sum(box.numel for box in self.boxes)

    def ranges(self, start: int, stop: int) -> Iterator[tuple[TensorBox, int, int]]:
        """Yield (box, start, stop) of the flattened boxes that make up ``[start, stop)`` of the flattened shard."""
        begin = 0
        for box in self.boxes:
            low, high = max(start - begin, 0), min(stop - begin, box.numel)
            if low < high:
                yield box, low, high
            begin += box.numel


def whole_shard(name: str, shape: Shape) -> TensorShard:
    """Return the shard of a tensor that every rank holds whole."""
    return TensorShard(name, shape, (TensorBox((0,) * len(shape), shape),))


def split_shard(
    name: str, shape: Shape, dim: int, rank: int, ranks: int, stacked: int = 1, total: int | None = None
) -> TensorShard:
    """Return the shard, of local ``shape``, that tensor rank ``rank`` of ``ranks`` holds when ``dim`` is split.

    ``stacked``: number of matrices one below the other in the whole tensor, each split separately.
    ``total``: size of ``dim`` in the whole tensor. The last shards are padded beyond it.
    """
    if ranks == 1:
        return whole_shard(name, shape)
    whole = tuple(size * ranks if axis == dim else size for axis, size in enumerate(shape))
    size = shape[dim] // stacked
    boxes = []
    for matrix in range(stacked):
        begin = matrix * (whole[dim] // stacked) + rank * size
        offset = tuple(begin if axis == dim else 0 for axis in range(len(shape)))
        boxes.append(TensorBox(offset, tuple(size if axis == dim else n for axis, n in enumerate(shape))))
    return (
        TensorShard(name, whole, tuple(boxes))
        if total is None
        else _cut(TensorShard(name, whole, tuple(boxes)), dim, total)
    )


def _cut(shard: TensorShard, dim: int, total: int) -> TensorShard:
    """Cut dimension ``dim`` of the whole tensor to ``total``."""

    def shortened(shape: Shape, size: int) -> Shape:
        return tuple(size if axis == dim else n for axis, n in enumerate(shape))

    boxes = [
        TensorBox(box.offset, shortened(box.shape, min(box.shape[dim], total - box.offset[dim]))) for box in shard.boxes
    ]
    return TensorShard(shard.name, shortened(shard.whole, total), tuple(boxes))


# ---- write


@dataclass(frozen=True, slots=True)
class TensorSnapshot:
    """One piece of a tensor: ``data`` [n] is the flattened ``box`` from ``start`` on, at last a copy on the host."""

    kind: str
    name: str
    whole: Shape
    box: TensorBox
    start: int
    data: torch.Tensor

    def piece(self, position: int, size: int, checksum: str) -> CheckpointPiece:
        """Return the index entry of this copy, written at byte ``position``."""
        return CheckpointPiece(
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


def snapshot(kind: str, shard: TensorShard, flat: torch.Tensor, start: int = 0) -> Iterator[TensorSnapshot]:
    """Yield the pieces of ``flat`` [n], which is the flattened shard from ``start`` on. They are no copies."""
    begin = 0
    for box, low, high in shard.ranges(start, start + flat.numel()):
        yield TensorSnapshot(kind, shard.name, shard.whole, box, low, flat[begin : begin + high - low].detach())
        begin += high - low


def write_tensors(path: Path, snapshots: Sequence[TensorSnapshot]) -> tuple[FileInfo, list[CheckpointPiece]]:
    """Write one safetensors file, tensor by tensor, and sync it. Raises OSError.

    Its tensors are flat and named ``{number}/{kind}/{name}``, for tools; a reader goes by the pieces.
    """
    contents = [entry.data.view(torch.uint8).numpy().data for entry in snapshots]
    entries = [
        TensorEntry(f"{number}/{one.kind}/{one.name}", _DTYPES[one.data.dtype], [one.data.numel()], len(content))
        for number, (one, content) in enumerate(zip(snapshots, contents, strict=True))
    ]
    info, starts = write_safetensors(path, entries, contents)
    written = zip(snapshots, starts, contents, strict=True)
    return info, [entry.piece(start, len(content), checksum_of(content)) for entry, start, content in written]


# ---- read


class PieceReader:
    """Reader of any part of any tensor of one role, from the files of all ranks. A context manager.

    The checksum of a piece is computed over the bytes that are used, not over a second read of them.
    """

    def __init__(self, directory: Path, indexes: Iterable[RankIndex]) -> None:
        self._directory = directory
        self._boxes: dict[tuple[str, str], dict[TensorBox, list[tuple[Path, CheckpointPiece]]]] = {}
        self._kinds: dict[str, dict[str, Shape]] = {}
        for index in indexes:
            path = directory / data_file(rank_stem(index.role, index.rank, index.layout.world_size))
            for piece in index.pieces:
                # it must be able to be a piece of a file of this size
                shapes = (piece.whole, piece.offset, piece.shape)
                fits = len({len(shape) for shape in shapes}) == 1 and all(
                    0 <= offset <= offset + length <= whole for whole, offset, length in zip(*shapes, strict=True)
                )
                if (
                    not (fits and piece.dtype in _ITEM_BYTES)
                    or not 0 <= piece.start <= piece.stop <= math.prod(piece.shape)
                    or piece.size != (piece.stop - piece.start) * _ITEM_BYTES[piece.dtype]
                    or not 0 <= piece.position <= index.file.size - piece.size
                ):
                    raise CheckpointError(
                        f"{path}: its index lists a piece that it cannot have: {piece}; use an older checkpoint"
                    )
                boxes = self._boxes.setdefault((piece.kind, piece.name), {})
                boxes.setdefault(TensorBox(piece.offset, piece.shape), []).append((path, piece))
                self._kinds.setdefault(piece.name, {})[piece.kind] = piece.whole
        self._files: dict[Path, BinaryIO] = {}
        self._stack = contextlib.ExitStack()
        self._last: tuple[CheckpointPiece, torch.Tensor] | None = None

    def __enter__(self) -> PieceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def kinds(self, name: str) -> dict[str, Shape]:
        """Return the kinds that were written of a parameter (it, its optimizer states) -> shape of the whole tensor."""
        return self._kinds.get(name, {})

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """Return the type in which a kind of a parameter was written."""
        _, piece = next(iter(self._boxes[kind, name].values()))[0]
        return cast(torch.dtype, getattr(torch, piece.dtype))

    def read(self, kind: str, shard: TensorShard, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return ``[start, stop)`` of the flattened shard on the CPU, in the type in which it was written.

        Elements behind the shard are padding: zero. Raises CheckpointError if a file is damaged, or if no
        rank wrote some of the elements.
        """
        end = shard.numel if stop is None else stop
        parts = [self._read_box(kind, shard.name, *part) for part in shard.ranges(start, end)]
        if missing := end - start - sum(len(part) for part in parts):
            parts.append(torch.zeros(missing, dtype=parts[0].dtype if parts else torch.float32))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_box(self, kind: str, name: str, box: TensorBox, start: int, stop: int) -> torch.Tensor:
        """Return ``[start, stop)`` of the flattened box: its rows, from every written box that overlaps them."""
        first, last = start // box.row, -(-stop // box.row)
        rows, filled = box.rows(first, last), 0
        out: torch.Tensor | None = None
        for source, pieces in self._boxes.get((kind, name), {}).items():
            overlap = rows.overlap(source)
            if overlap is None:
                continue
            top = overlap.offset[0] - source.offset[0]
            read_rows = source.rows(top, top + overlap.shape[0])
            block = self._read_flat(pieces, top * source.row, (top + overlap.shape[0]) * source.row)
            if out is None:
                out = torch.empty(rows.shape, dtype=block.dtype)
            out[overlap.within(rows)] = block.view(read_rows.shape)[overlap.within(read_rows)]
            filled += overlap.numel
        if out is None or filled != rows.numel:
            raise self._incomplete(kind, name, filled, rows.numel)
        return out.flatten()[start - first * box.row : stop - first * box.row]

    def _read_flat(self, pieces: Sequence[tuple[Path, CheckpointPiece]], start: int, stop: int) -> torch.Tensor:
        """Return ``[start, stop)`` of one flattened box that was written in ``pieces``."""
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

    def _incomplete(self, kind: str, name: str, filled: int, needed: int) -> CheckpointError:
        problem = f"only {filled} of {needed} elements were written; use an older checkpoint"
        return CheckpointError(f"{self._directory}: {name} ({kind}) is not complete: {problem}")

    def _load(self, path: Path, piece: CheckpointPiece) -> torch.Tensor:
        """Return the flat content of a piece. The last one is kept: a box may read gate and up from one piece."""
        if self._last is not None and self._last[0] is piece:
            return self._last[1]
        if path not in self._files:
            try:
                self._files[path] = self._stack.enter_context(path.open("rb"))
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}; use an older checkpoint") from None
        file = self._files[path]
        content = bytearray(piece.size)
        file.seek(piece.position)
        if file.readinto(content) != piece.size or checksum_of(content) != piece.checksum:  # type: ignore[attr-defined]
            problem = f"{piece.name} ({piece.kind}) is not what was written"
            raise CheckpointError(f"{path} is corrupt: {problem}; use an older checkpoint")
        tensor = torch.frombuffer(content, dtype=getattr(torch, piece.dtype))
        self._last = (piece, tensor)
        return tensor


@dataclass(frozen=True, slots=True)
class TensorPart:
    """``[start, stop)`` of a flattened shard. ``shared``: all data ranks load it; else this rank alone."""

    reader: PieceReader
    kind: str
    shard: TensorShard
    start: int
    stop: int
    shared: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the whole shard in its widest type."""
        return 4 * self.shard.numel

    def read(self) -> torch.Tensor:
        """Return the part, flat. Raises CheckpointError."""
        return self.reader.read(self.kind, self.shard, self.start, self.stop)

    def blank(self, device: torch.device) -> torch.Tensor:
        """Return memory for the part on ``device``."""
        return torch.empty(self.stop - self.start, dtype=self.reader.dtype(self.kind, self.shard.name), device=device)
