"""Runs of equal values in the arrays of a row, and the arrays again. Pure.

Loss mask and versions seldom change within a row. A mask is the lengths of its runs, False and True in turn, False
first. Versions are runs (version, tokens), or (version, tokens, version of the oldest keys) where they differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from realsys.types import I32, Mask, constant

INT = np.dtype("<i4")
VersionRuns = Sequence[tuple[int, ...]]


def mask_runs(mask: Mask) -> list[int]:
    """Return the lengths of the runs of a mask that begins with False."""
    first = int(mask.argmax())
    if first + np.count_nonzero(mask) == len(mask):  # prompt and one completion: ten times as fast
        return [first, len(mask) - first]
    ends = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    return np.diff(ends, prepend=0, append=len(mask)).tolist()  # type: ignore[no-any-return]


def version_runs(versions: I32, kv_versions: I32 | None = None) -> list[tuple[int, ...]]:
    """Return the runs of ``versions``, or of both arrays together."""
    if not len(versions):
        return []
    if constant(versions) and kv_versions is None:
        return [(int(versions[0]), len(versions))]
    changes = versions[1:] != versions[:-1]
    if kv_versions is not None:
        changes |= kv_versions[1:] != kv_versions[:-1]
    starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
    ends = [*starts[1:], len(versions)]
    runs = [(int(versions[start]), end - start) for start, end in zip(starts, ends, strict=True)]
    oldest = versions if kv_versions is None else kv_versions
    return [
        run if oldest[start] == run[0] else (*run, int(oldest[start])) for start, run in zip(starts, runs, strict=True)
    ]


def expand_versions(runs: VersionRuns) -> I32:
    """Return one version per token, read-only.

    If all versions are equal, the array is one number in memory: fresh pages for a number per token
    would cost more than the rest of decoding a large group.
    """
    size = sum(run[1] for run in runs)
    if len({run[0] for run in runs}) == 1:
        return np.broadcast_to(np.array(runs[0][0], dtype=INT), (size,))
    versions: I32 = np.empty(size, dtype=INT)
    start = 0
    for version, count, *_ in runs:
        versions[start : start + count] = version
        start += count
    versions.flags.writeable = False
    return versions


def expand_kv_versions(runs: VersionRuns) -> I32 | None:
    """Return the version of the oldest keys of each token, read-only; None if all are those of the tokens."""
    if all(len(run) == 2 for run in runs):
        return None
    kv_versions = np.array([run[2] if len(run) > 2 else run[0] for run in runs], INT).repeat([run[1] for run in runs])
    kv_versions.flags.writeable = False
    return kv_versions


def expand_masks(rows: Sequence[Sequence[int]], size: int) -> Mask:
    """Return the loss masks of all rows, concatenated, read-only."""
    masks = np.zeros(size, np.bool_)
    start = 0
    for runs in rows:
        for number, count in enumerate(runs):
            if number % 2:
                masks[start : start + count] = True
            start += count
    masks.flags.writeable = False
    return masks
