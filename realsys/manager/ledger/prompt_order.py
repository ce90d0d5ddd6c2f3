"""Order of the prompts: a seeded permutation per epoch, a pure function of (seed, epoch, size); and the curriculum.

With ``data.order=script`` the order is the sequence that the training script submits. That is state of the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt


@lru_cache(maxsize=2)  # the ledger and its audit ask for the same one, and so does each simulation of a planner
def permutation(seed: int, epoch: int, size: int) -> npt.NDArray[np.int64]:
    """Return the order of ``size`` prompts in ``epoch``, int64 [size]. Equal arguments give equal orders anywhere."""
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(size)
    order.flags.writeable = False
    return order


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


UNSEEN = -1  # success rate of a prompt without a verdict


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Choice of prompts by their measured success rate: a position of the order is taken or passed over.

    A prompt without a measurement, or with one from ``low`` to ``high`` (per mille), is always taken. Any other one is
    taken with probability ``floor``, drawn from seed and position alone, so that no prompt is passed over for ever.
    """

    low: int
    high: int
    floor: float

    def takes(self, seed: int, position: int, rate: int) -> bool:
        """Return True if the prompt at ``position`` is taken; ``rate``: its success rate in per mille, or UNSEEN."""
        if rate == UNSEEN or self.low <= rate <= self.high:
            return True
        # a number in [0, 1) that looks random: SplitMix64, because a SeedSequence takes 10 µs
        state = (seed * 0xD1342543DE82EF95 + position * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((state ^ (state >> 31)) / 2.0**64) < self.floor


_MASK = (1 << 64) - 1
