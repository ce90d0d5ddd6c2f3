"""Files of a split in a folder: one that `datasets` saved, or one in the form of a repository on the Hugging Face hub.

saved       state.json, data-00000-of-00001.arrow            Dataset.save_to_disk
saved       dataset_dict.json, train/state.json, ...         DatasetDict.save_to_disk
repository  data/train-00000-of-00002.parquet, test.jsonl    the split is a word of the file's path
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realsys.errors import DataError

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
        return _saved(folder)
    return _repository(folder, splits)


def _saved(folder: Path) -> list[Path]:
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


def _repository(folder: Path, splits: Sequence[str]) -> list[Path]:
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix in SUFFIXES and file.name not in _SETTINGS and not _hidden(file.relative_to(folder))
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


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: must contain a JSON object")
    return value
