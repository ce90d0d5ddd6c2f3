"""Puts away what a dead run left in its trial folder: names, half-written files, its report and its errors."""

from __future__ import annotations

import shutil
from pathlib import Path

from realsys.config.paths import TrialPaths

_KEPT_ERRORS = 50  # files of earlier starts
_HALF_WRITTEN = (
    "*.tmp",
    "keys/*.tmp",
    "weights/*/*.tmp",
    "checkpoints/*.tmp",
    "hf/*.tmp",
    "record/*.tmp",
    "errors/.*",
    "stopping",
    "stop",
)


def tidy(paths: TrialPaths) -> None:
    """Remove what the last run left and the next must not meet, and nothing that training continues from.

    Raises OSError.
    """
    for left in (*own_stores(paths), *half_written(paths)):
        remove_path(left)
    paths.summary.unlink(missing_ok=True)  # `realsys status` would show it as the end of this run
    old = paths.errors / "old"
    for error in sorted(paths.errors.glob("*.json")):  # the next run must not take one for its first failure
        old.mkdir(exist_ok=True)
        error.replace(_free(old / error.name))
    for error in sorted(old.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-_KEPT_ERRORS]:
        error.unlink()


def remove_half_written(paths: TrialPaths) -> None:
    """Remove the files that dead processes were writing. Raises OSError."""
    for path in half_written(paths):
        remove_path(path)


def half_written(paths: TrialPaths) -> list[Path]:
    """Return the files and folders that processes write, or were writing when they died."""
    return [path for pattern in _HALF_WRITTEN for path in sorted(paths.root.glob(pattern))]


def own_stores(paths: TrialPaths) -> list[Path]:
    """Return what the name stores of a run have in its folder. It is of use only while the trial runs."""
    own = (paths.name_store, paths.own_etcd, paths.store_address)
    return [*(path for path in own if path.exists()), *sorted(paths.keys.glob("etcd*.pem"))]


def remove_path(path: Path) -> None:
    """Remove a file, or a folder with all it has. Raises OSError."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _free(path: Path) -> Path:
    """Return ``path``, with a number if it is taken: a pid may be used again."""
    free, number = path, 2
    while free.exists():
        free, number = path.with_stem(f"{path.stem}-{number}"), number + 1
    return free
