"""Sources of rows, opened by their name in the configuration.

    FILE.jsonl  FILE.json  FILE.parquet  FILE.arrow  FOLDER  FOLDER@SPLIT  reasoning_gym:NAME  verifiers:ENV

A file with another name is read as lines of JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from realsys.config.schema_data import GENERATED, RG, VERIFIERS, split_suffix
from realsys.data.sources.files import Rows, arrow_rows, files_of, json_rows, parquet_rows
from realsys.data.sources.reasoning_gym import generated_rows
from realsys.data.sources.verifiers_tasks import task_rows
from realsys.errors import DataError

#: splits of a folder that are read for each split of realsys, the first that it has
FOLDER_SPLITS = {"train": ("train",), "eval": ("test", "validation")}
_NOT_READ = (".csv", ".tsv", ".xlsx", ".gz", ".zst", ".zip")
_READERS: dict[str, Callable[[Path], Rows]] = {".parquet": parquet_rows, ".arrow": arrow_rows}


def source_files(source: str, split: str) -> list[Path]:
    """Return the files of a source; none for a generated one. Raises DataError."""
    if source.startswith(GENERATED):
        return []
    name, own = split_suffix(source)
    path = Path(name)
    splits: Sequence[str] = (own,) if own else FOLDER_SPLITS[split]
    if path.is_dir():
        return files_of(path, splits)
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder")
    return [path]


def source_rows(source: str, split: str, arguments: Mapping[str, Any]) -> Rows:
    """Yield the rows of a source. ``arguments``: those of a generated source. Raises DataError."""
    if source.startswith(RG):
        yield from generated_rows(source.removeprefix(RG), split, arguments)
        return
    if source.startswith(VERIFIERS):
        yield from task_rows(source.removeprefix(VERIFIERS), split, arguments)
        return
    for path in source_files(source, split):
        if path.suffix.lower() in _NOT_READ:
            problem = f"{path.suffix} files are not read: write it as lines of JSON (.jsonl) or as .parquet"
            raise DataError(f"{path}: {problem}")
        yield from _READERS.get(path.suffix.lower(), json_rows)(path)
