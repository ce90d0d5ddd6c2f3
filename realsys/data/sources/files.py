"""Rows of a source, and their readers for JSON files, tables and folders.

Every reader yields its rows a part at a time, so that a file may be larger than memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from realsys.data.lines import BYTE_ORDER_MARK, scan_lines, without_nulls
from realsys.errors import MALFORMED, DataError


class SourceRow(NamedTuple):
    """One row of a source.

    where    "file:line" of a text file, "file:row N" of a table; both from 1
    values   keys and values
    problem  the reason why the row cannot be read, "" if it can; then ``values`` is empty
    """

    where: str
    values: dict[str, Any]
    problem: str = ""


Rows = Iterator[SourceRow]


def need(package: str, extra: str, what: str) -> DataError:
    """Return the error for an optional package that is not installed."""
    return DataError(f"{what} needs the package {package}: pip install 'realsys[{extra}]'")


# ---- JSON files: one object per line, or one array of objects

_OBJECT: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


def json_rows(path: Path) -> Rows:
    """Yield the objects of a file. Raises DataError if it cannot be read.

    A file of lines is read line by line; an array is read as a whole.
    """
    is_first = True
    for _, number, line in scan_lines(path):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if is_first and line.lstrip().startswith(b"["):
            yield from _array(path)
            return
        if is_first and line.strip() == b"{":
            problem = "an object over several lines: write one object per line, or an array of them"
            raise DataError(f"{path}:{number}: {problem}")
        is_first = False
        try:
            values, problem = _OBJECT.decode(line), ""
        except MALFORMED as error:
            values, problem = {}, str(error)
        yield SourceRow(f"{path}:{number}", values, problem)


def _array(path: Path) -> Rows:
    try:
        content = path.read_bytes().removeprefix(BYTE_ORDER_MARK)
        array = msgspec.json.decode(content, type=list[Any])
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except MALFORMED as error:
        raise DataError(f"{path}: {error}: a file that begins with [ must be one JSON array of objects") from None
    for number, values in enumerate(array, 1):
        if isinstance(values, dict):
            yield SourceRow(f"{path}:row {number}", values)
        else:
            yield SourceRow(f"{path}:row {number}", {}, f"Expected `object`, got `{type(values).__name__}`")


# ---- parquet and Arrow files. Needs pyarrow, which is optional

#: Rows that are Python objects at a time. A row may have tests of many MiB.
_BATCH = 64
#: Size of one read. Without a buffer, pyarrow reads a whole column of a row group, and a file may have one row group.
_BUFFER_BYTES = 1 << 20


def parquet_rows(path: Path) -> Rows:
    """Yield the rows of a parquet file. Raises DataError."""
    pyarrow = _pyarrow(path)
    from pyarrow import parquet

    def batches() -> Iterator[Any]:
        with parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            yield from file.iter_batches(batch_size=_BATCH)

    return _rows(path, batches(), pyarrow)


def arrow_rows(path: Path) -> Rows:
    """Yield the rows of an Arrow file, in the stream format (as `datasets` writes it) or the file format."""
    pyarrow = _pyarrow(path)

    def batches() -> Iterator[Any]:
        with pyarrow.memory_map(str(path)) as file:
            if file.read(6) == b"ARROW1":
                reader = pyarrow.ipc.open_file(file)
                yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                file.seek(0)
                yield from pyarrow.ipc.open_stream(file)

    return _rows(path, batches(), pyarrow)


def _rows(path: Path, batches: Iterator[Any], pyarrow: Any) -> Rows:
    number = 0
    try:
        for values in _values(batches):
            number += 1
            yield SourceRow(f"{path}:row {number}", values)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{path}: cannot be read after row {number}: {reason}") from None


def _values(batches: Iterator[Any]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        for start in range(0, batch.num_rows, _BATCH):
            for row in batch.slice(start, _BATCH).to_pylist():
                # a table adds keys to messages and tools, to give all objects of a list the same ones
                yield {
                    key: without_nulls(value, ()) if isinstance(value, list) else value for key, value in row.items()
                }


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise need("pyarrow", "data", f"{path}: reading a {path.suffix or 'table'} file") from None
    return pyarrow


# ---- files of a split in a folder: one that `datasets` saved, or a copy of a repository on the Hugging Face hub
#
# saved       state.json, data-00000-of-00001.arrow            Dataset.save_to_disk
# saved       dataset_dict.json, train/state.json, ...         DatasetDict.save_to_disk
# repository  data/train-00000-of-00002.parquet, test.jsonl    the split is a word of the file's path

SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json")
#: words of a path -> split
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}
_SETTINGS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})


def files_of(folder: Path, splits: Sequence[str]) -> list[Path]:
    """Return the files of the first of ``splits`` that the folder has, in order. Raises DataError."""
    if (folder / "dataset_dict.json").is_file():
        names = _read(folder / "dataset_dict.json").get("splits") or []
        return files_of(folder / _choose(folder, [str(name) for name in names], splits), splits)
    if (folder / "state.json").is_file():
        state = _read(folder / "state.json")
        try:
            files = [folder / entry["filename"] for entry in state["_data_files"]]
        except (KeyError, TypeError):
            raise DataError(f"{folder / 'state.json'}: names no _data_files: it is not of a saved dataset") from None
        if missing := [
            str(file) for file in files if not file.is_file() or not file.resolve().is_relative_to(folder.resolve())
        ]:
            raise DataError(f"{folder / 'state.json'}: file not found in this folder: {', '.join(missing)}")
        return files
    return _repository(folder, splits)


def _repository(folder: Path, splits: Sequence[str]) -> list[Path]:
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix in SUFFIXES
        and file.name not in _SETTINGS
        and not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
    )
    if not files:
        raise DataError(f"{folder}: no data files found ({', '.join(SUFFIXES)}): name a file or another folder")
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(folder)), []).append(file)
    if set(by_split) == {""}:
        by_split = {"train": files}
    chosen = by_split[_choose(folder, [name for name in by_split if name], splits)]
    if len(configs := sorted({_config_of(file.relative_to(folder)) for file in chosen})) > 1:
        raise DataError(f"{folder}: has several data sets: name one of the folders {', '.join(configs)}")
    if len(kinds := sorted({file.suffix for file in chosen})) > 1:
        raise DataError(f"{folder}: the split has files of several kinds ({', '.join(kinds)}): name one of the files")
    return chosen


def _choose(folder: Path, names: Sequence[str], splits: Sequence[str]) -> str:
    for split in splits:
        if split in names:
            return split
    has = ", ".join(sorted(names)) or "none"
    raise DataError(f"{folder}: split {splits[0]!r} not found, it has {has}: write {folder}@SPLIT")


def _split_of(path: Path) -> str:
    """Return the split that a path names, "" without one. The name of the file counts before its folders."""
    for part in (path.stem, *reversed(path.parts[:-1])):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLITS:
                return _SPLITS[word]
    return ""


def _config_of(path: Path) -> str:
    """Return the folder of a configuration, "." without one; ``data`` and folders of splits are none."""
    parts = [part for part in path.parts[:-1] if part != "data" and part.lower() not in _SPLITS]
    return "/".join(parts) or "."


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: must contain a JSON object")
    return value
