"""Records of the disk transport: the plan for the ranks, and the entries of a version's manifest.
No torch, no I/O."""

from __future__ import annotations

import msgspec


class DiskPlan(msgspec.Struct):
    """Instructions to every rank: write into the existing folder ``directory``.

    ``base``: folder name of the version before, which this one may refer to; empty: write
    everything.
    """

    directory: str
    base: str = ""


class Piece(msgspec.Struct, omit_defaults=True):
    """Bytes of a file that make up a tensor: all of it, or its difference from the tensor with
    checksum ``base``.

    ``folder``: folder name of the version that wrote the bytes; empty: the version itself.
    """

    file: str
    start: int  # byte in the file
    size: int  # bytes
    checksum: str  # xxh3-64 of these bytes, hex
    base: str = ""
    folder: str = ""


class TensorInfo(msgspec.Struct):
    """A tensor of a weight version, as its writer reports it.

    The first piece is the whole tensor, and each further piece changes it.
    """

    dtype: str  # name in safetensors: BF16, F32, ...
    shape: list[int]
    checksum: str  # xxh3-64 of the tensor's bytes, hex
    pieces: list[Piece]


class ShardInfo(msgspec.Struct):
    """One rank's file of a weight version, and the rank's share of the tensors, by HF name."""

    file: str
    size: int  # bytes
    checksum: str  # xxh3-64 of the whole file, hex
    tensors: dict[str, TensorInfo]
