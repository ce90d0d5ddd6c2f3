"""Rows of parquet and Arrow files. Needs pyarrow, which is optional."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from realsys.data.lines import without_nulls
from realsys.data.sources.source_row import Rows, SourceRow, need
from realsys.errors import DataError

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
                yield {key: _without_nulls(value) for key, value in row.items()}


def _without_nulls(value: Any) -> Any:
    """Leave out the keys that a table adds to messages and tools, to give all objects of a list the same ones."""
    return without_nulls(value, ()) if isinstance(value, list) else value


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise need("pyarrow", "data", f"{path}: reading a {path.suffix or 'table'} file") from None
    return pyarrow
