"""Freed host memory: it goes back to the system if there is much of it."""

from pathlib import Path

import numpy as np

from realsys.cluster.process import trim_heap


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_freed_memory_goes_back_to_the_system():
    """Every hundredth block stays, so glibc returns nothing by itself."""
    blocks = [np.ones(100_000, np.uint8) for _ in range(4000)]
    kept = blocks[::100]
    del blocks
    before = resident_bytes()
    assert trim_heap()
    assert before - resident_bytes() > 200 << 20
    assert len(kept) == 40


def test_small_heaps_are_left_alone():
    assert not trim_heap(keep_bytes=1 << 60)
