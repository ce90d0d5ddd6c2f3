"""Rows of JSON files: one object per line, or one array of objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from realsys.data.lines import BYTE_ORDER_MARK, scan_lines
from realsys.data.sources.source_row import Rows, SourceRow
from realsys.errors import MALFORMED, DataError

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
