"""Merge of low-rank adapters into weights, with the same bits wherever it is computed; shares with adapters.

    W' = round(W + scale * B A)        W [out, in], B [out, rank], A [rank, in]; round: to fp32, then to the type of W

The trainer merges slices on its devices, a server merges whole matrices on its CPUs, and a version is served only if
its checksums match. A product in fp32 depends on the order of its sums, and so on device, library, threads and shape.
So B and A become integers here, with a power of two for each row of B and each column of A. Their product in fp64 is
exact, because no partial sum reaches 2 ** 53. The steps after it are elementwise, one rounding each.

The integers have 24 bits up to rank 32, and 22 up to rank 512, relative to the largest of their row or column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

_CACHED, _BLOCK = 1 << 18, 1 << 23  # elements that are merged at a time, in fp64: in the cache of a CPU, or on a GPU
_EXACT_BITS = 53  # integers up to 2 ** 53 are exact in fp64


def merged(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return W' in the type of ``base``, W, for slices or for whole matrices. ``base`` stays as it is."""
    result = torch.empty_like(base)
    merge(base, a, b, scale, result)
    return result


@torch.no_grad()
def merge(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, into: torch.Tensor) -> None:
    """Write W' to ``into``, which may be ``base``."""
    bits = (_EXACT_BITS - (len(a) - 1).bit_length()) // 2
    right, columns = _integers(a, 0, bits)
    left, rows = _integers(b, 1, bits)
    rows *= scale
    step = max(1, (_CACHED if base.is_cpu else _BLOCK) // max(1, base.shape[1]))
    for begin in range(0, len(base), step):
        part = slice(begin, begin + step)
        product = left[part] @ right
        # Separate operations: a fused multiply-add would round once less.
        product.mul_(rows[part]).mul_(columns).add_(base[part])
        into[part].copy_(product.float())


def _integers(factor: torch.Tensor, dim: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp64 integers of up to ``bits`` bits, and the powers of two that turn them back into ``factor``."""
    exact = factor.double()
    largest = exact.abs().amax(dim, keepdim=True)
    # The largest number divided by its mantissa is a power of two, exactly.
    power = torch.where(largest > 0, largest / torch.frexp(largest).mantissa, 1.0)
    unit = power * 2.0**-bits
    return (exact / unit).round_(), unit


def factors_of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return A and B in one dimension, in the order in which a version stores them."""
    return torch.cat([a.reshape(-1), b.reshape(-1)])


def split_factors(factors: torch.Tensor, rank: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [rank, columns] and B [rows, rank]: the inverse of ``factors_of``."""
    a, b = torch.split(factors, [rank * columns, len(factors) - rank * columns])
    return a.view(rank, columns), b.view(-1, rank)


@dataclass(slots=True)
class AdaptedTensors(Mapping[str, torch.Tensor]):
    """A rank's share of a model with adapters: its tensors by HF name, merged each time they are asked for.

    frozen     tensors without adapters, and those under them; they are the same in all versions
    checksums  name -> xxh3-64 of the frozen tensor's bytes, hex; empty until they are computed
    factors    ``factors_of`` the adapter by the name of its tensor
    scale      alpha / rank
    """

    frozen: Mapping[str, torch.Tensor]
    checksums: dict[str, str]
    factors: Mapping[str, torch.Tensor]
    rank: int
    scale: float

    def __getitem__(self, name: str) -> torch.Tensor:
        base = self.frozen[name]
        if name not in self.factors:
            return base
        a, b = split_factors(self.factors[name], self.rank, base.shape[1])
        return merged(base, a, b, self.scale)

    def __iter__(self) -> Iterator[str]:
        return iter(self.frozen)

    def __len__(self) -> int:
        return len(self.frozen)
