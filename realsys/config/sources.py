"""Names of data sources: a path, ``FOLDER@SPLIT``, or ``reasoning_gym:NAME``."""

from __future__ import annotations

import os
from pathlib import Path

RG = "reasoning_gym:"


def split_suffix(source: str) -> tuple[str, str]:
    """Return the path and the split of ``FOLDER@SPLIT``; the split is "" if the whole name exists."""
    path, at, split = source.rpartition("@")
    return (path, split) if at and split and "/" not in split and not os.path.exists(source) else (source, "")


def absolute_source(source: str) -> str:
    """Make the path of a source absolute; generated sources have none."""
    if not source or source.startswith(RG):
        return source
    path, split = split_suffix(os.path.expanduser(source))
    return f"{Path(path).resolve()}@{split}" if split else str(Path(path).resolve())


def source_problem(source: str) -> str:
    """Return why a source cannot be opened, "" if it can."""
    if source.startswith(RG):
        return ""
    path = split_suffix(source)[0]
    readable = (os.path.isfile(path) or os.path.isdir(path)) and os.access(path, os.R_OK)
    return "" if readable else "is not a readable file or folder"
