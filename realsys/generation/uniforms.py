"""Random numbers that depend only on (seed, completion, position): no generator state, any batch, any order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def splitmix64(state: U64) -> U64:
    """Mix 64-bit words with the finaliser of SplitMix64: a bijection whose results look random."""
    z = state + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def completion_seed(seed: int, completion: int) -> int:
    """Derive the seed of one completion of a request, 63 bits, for an engine with its own random numbers."""
    mixed = splitmix64(np.asarray([seed & 0xFFFFFFFFFFFFFFFF], np.uint64))
    return int(splitmix64(mixed + np.uint64(completion))[0] >> np.uint64(1))


def uniforms(seed: int, completion: int, count: int) -> npt.NDArray[np.float32]:
    """Draw numbers in [0, 1) for positions 0..count-1 of a completion, with 24 random bits each."""
    key = splitmix64(np.asarray([seed & 0xFFFFFFFFFFFFFFFF], np.uint64))
    # Not symmetric in seed and completion: completion 1 of seed 2 must not repeat completion 2 of seed 1.
    key = splitmix64(key ^ (np.asarray([completion], np.uint64) * _MIX_1))
    words = splitmix64(key + np.arange(count, dtype=np.uint64) * _GOLDEN)
    # 24 bits, because float32 holds no more: a 25th could round up to 1.0.
    return ((words >> np.uint64(40)).astype(np.float32)) * np.float32(2.0**-24)
