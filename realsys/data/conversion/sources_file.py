"""sources.json: the file that says how the trial's own data was made. Its presence means that the copy is complete."""

from __future__ import annotations

from pathlib import Path

import msgspec

from realsys.data.dataset_files import SOURCES
from realsys.errors import DataError


class Converted(msgspec.Struct, frozen=True):
    """Entry of sources.json: ``rows`` of train.jsonl are from this source, ``dropped`` were too long."""

    name: str
    weight: float
    rows: int
    dropped: int


class Sources(msgspec.Struct, frozen=True):
    """Content of sources.json, in the order of the lines."""

    train: list[Converted]
    eval: list[Converted]


def read_sources(directory: Path) -> list[Converted]:
    """Return the sources of train.jsonl, in the order of its lines. Raises DataError."""
    return _read(directory).train


def dropped_lines(directory: Path) -> list[str]:
    """Return a line for each source whose long prompts were left out. Raises DataError."""
    sources = _read(directory)
    return [
        f"left out {source.dropped} of {source.rows + source.dropped} rows of {source.name}: "
        "they have more than data.max_prompt_tokens"
        for source in (*sources.train, *sources.eval)
        if source.dropped
    ]


def _read(directory: Path) -> Sources:
    try:
        return msgspec.json.decode((directory / SOURCES).read_bytes(), type=Sources)
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(f"{directory / SOURCES}: cannot be read: {error}") from None
