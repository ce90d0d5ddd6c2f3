"""Puts away what a dead run left in its trial folder: names, half-written files, its report and its errors."""

from __future__ import annotations

import shutil
from pathlib import Path

from realsys.config.paths import TrialPaths

_KEPT_ERRORS = 50  # files of earlier starts
_HALF_WRITTEN = ("*.tmp", "weights/*/*.tmp", "checkpoints/*.tmp", "hf/*.tmp", "record/*.tmp", "errors/.*", "stopping")


def tidy(paths: TrialPaths) -> None:
    """Remove what the last run left and the next must not meet, and nothing that training continues from.

    Raises OSError.
    """
    for folder in (paths.name_store, paths.own_etcd):
        if folder.exists():
            shutil.rmtree(folder)
    remove_half_written(paths)
    paths.summary.unlink(missing_ok=True)  # `realsys status` would show it as the end of this run
    old = paths.errors / "old"
    for error in sorted(paths.errors.glob("*.json")):  # the next run must not take one for its first failure
        old.mkdir(exist_ok=True)
        error.replace(_free(old / error.name))
    for error in sorted(old.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-_KEPT_ERRORS]:
        error.unlink()


def remove_half_written(paths: TrialPaths) -> None:
    """Remove the files that dead processes were writing. Raises OSError."""
    for half_written in (f for pattern in _HALF_WRITTEN for f in paths.root.glob(pattern)):
        if half_written.is_dir():
            shutil.rmtree(half_written)
        else:
            half_written.unlink(missing_ok=True)


def _free(path: Path) -> Path:
    """Return ``path``, with a number if it is taken: a pid may be used again."""
    free, number = path, 2
    while free.exists():
        free, number = path.with_stem(f"{path.stem}-{number}"), number + 1
    return free
