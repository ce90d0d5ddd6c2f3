"""sources.json: the file that says how the trial's own data was made. Its presence means that the copy is complete."""

from __future__ import annotations

import msgspec

from realsys.config.paths import TrialPaths
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


def read_sources(paths: TrialPaths) -> list[Converted]:
    """Return the sources of train.jsonl, in the order of its lines. Raises DataError."""
    return _read(paths).train


def dropped_lines(paths: TrialPaths) -> list[str]:
    """Return a line for each source whose long prompts were left out. Raises DataError."""
    sources = _read(paths)
    return [
        f"left out {source.dropped} of {source.rows + source.dropped} rows of {source.name}: "
        "they have more than data.max_prompt_tokens"
        for source in (*sources.train, *sources.eval)
        if source.dropped
    ]


def _read(paths: TrialPaths) -> Sources:
    try:
        return msgspec.json.decode(paths.data_sources.read_bytes(), type=Sources)
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(f"{paths.data_sources}: cannot be read: {error}") from None
