"""Hashes of the prefixes of a prompt, by which routing finds a server that has computed one."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

BLOCK = 64  # tokens; engines share prefixes in whole pages, so smaller blocks would find no more
MAX_BLOCKS = 32  # hashes per request


def prefix_hashes(tokens: Sequence[int]) -> list[int]:
    """Return a 32-bit hash of each prefix of whole blocks, shortest first, and last of the whole prompt.

    Equal prompts get equal lists; prompts that share their first k blocks share the first k hashes.
    """
    data = np.asarray(tokens, np.int32).tobytes()
    step = 4 * BLOCK
    hashes, running = [], 0
    for start in range(0, min(len(data), MAX_BLOCKS * step) - step + 1, step):
        running = zlib.crc32(data[start : start + step], running)
        hashes.append(running)
    whole = zlib.crc32(data)
    return hashes if hashes and hashes[-1] == whole else [*hashes, whole]
