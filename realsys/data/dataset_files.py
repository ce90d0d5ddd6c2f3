"""Dataset files that a trial reads: their paths, the writing of its own ones, and the record of how these were made."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import DataError


@dataclass(frozen=True, slots=True)
class DatasetFiles:
    """Dataset files. One of ``train`` and ``eval`` is given.

    train  None: an evaluation reads held-out problems alone
    eval   None: a fraction of ``train`` is held out
    demos  None: no demonstrations
    """

    train: Path | None
    eval: Path | None
    demos: Path | None


def dataset_files(config: Config, paths: TrialPaths) -> DatasetFiles:
    """Return the files of this trial: the user's, or those that the launcher made in the trial folder.

    Made are the arith task, and copies of sources that cannot be read in their place.
    """
    data = config.data
    own = {name: paths.data / f"{name}.jsonl" for name in ("train", "eval", "demos")}
    if data.kind == "arith":
        return DatasetFiles(**own)
    train, held_out, demos = (Path(name) if name else None for name in (data.train, data.eval, data.demos))
    if is_converted(paths):
        return DatasetFiles(own["train"] if train or data.mixture else None, own["eval"] if held_out else None, demos)
    return DatasetFiles(train, held_out, demos)


def set_file(paths: TrialPaths, name: str) -> Path:
    """Return the trial's own copy of an evaluation set's data."""
    return paths.data / "evaluation" / f"{name}.jsonl"


def is_converted(paths: TrialPaths) -> bool:
    """Return True if the trial has its own copy of the data."""
    return paths.data_sources.is_file()


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file that appears with all of its content or not at all, also after a crash."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp makes the file private, but workers of other users may read it
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)  # it is there only if a line above failed


# ---- sources.json says how the trial's own data was made; its presence means that the copy is complete


class ConvertedSource(msgspec.Struct, frozen=True):
    """Entry of sources.json: ``rows`` of train.jsonl are from this source, ``dropped`` were too long."""

    name: str
    weight: float
    rows: int
    dropped: int


class SourcesFile(msgspec.Struct, frozen=True):
    """Content of sources.json, in the order of the lines."""

    train: list[ConvertedSource]
    eval: list[ConvertedSource]


def read_sources(paths: TrialPaths) -> list[ConvertedSource]:
    """Return the sources of train.jsonl, in the order of its lines. Raises DataError."""
    return _sources_file(paths).train


def dropped_lines(paths: TrialPaths) -> list[str]:
    """Return a line for each source whose long prompts were left out. Raises DataError."""
    sources = _sources_file(paths)
    return [
        f"left out {source.dropped} of {source.rows + source.dropped} rows of {source.name}: "
        "they have more than data.max_prompt_tokens"
        for source in (*sources.train, *sources.eval)
        if source.dropped
    ]


def _sources_file(paths: TrialPaths) -> SourcesFile:
    try:
        return msgspec.json.decode(paths.data_sources.read_bytes(), type=SourcesFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(f"{paths.data_sources}: cannot be read: {error}") from None
