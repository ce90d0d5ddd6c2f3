"""Order of the prompts: a seeded permutation per epoch, a pure function of (seed, epoch, size)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def permutation(seed: int, epoch: int, size: int) -> npt.NDArray[np.int64]:
    """Return the order of ``size`` prompts in ``epoch``, int64 [size]. Equal arguments give equal orders anywhere."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(size)


def sampling_seed(*parts: int) -> int:
    """Mix ``parts`` (trial seed, ticket number, attempt, ...) to a 31-bit seed."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0]) & 0x7FFFFFFF


class PromptOrder:
    """Prompt index by position: position // size is the epoch. Holds the permutation of one epoch at a time."""

    def __init__(self, seed: int, size: int, epochs: int = 0) -> None:
        """``epochs`` 0: no limit. Raises ValueError for an empty dataset."""
        if size < 1:
            raise ValueError(f"the train split has {size} prompts: it must have at least one")
        self.seed = seed
        self.size = size
        self.epochs = epochs
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)

    def at(self, position: int) -> int | None:
        """Return the index of the prompt at ``position``, None when the epochs are used up."""
        epoch, offset = divmod(position, self.size)
        if self.epochs and epoch >= self.epochs:
            return None
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, permutation(self.seed, epoch, self.size)
        return int(self._permutation[offset])
