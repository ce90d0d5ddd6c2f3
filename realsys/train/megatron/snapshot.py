"""Copy of a role's weights of one version in host memory, to score with later.

take at version s ──host memory──> swapped in for a forward pass at a later version ──> current weights back
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch


class WeightSnapshot:
    """Copy of ``parameters`` as they are now. It costs their size in host memory."""

    def __init__(self, version: int, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.version = version
        self._parameters = list(parameters)
        self._copies = self._copy()

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Give the parameters the values of the snapshot; afterwards they are as before, bit by bit."""
        current = self._copy()
        self._write(self._copies)
        try:
            yield
        finally:
            self._write(current)

    def _copy(self) -> list[torch.Tensor]:
        return [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]

    def _write(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)
