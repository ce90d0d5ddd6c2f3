"""Rows of a source. Every reader yields them a part at a time, so that a file may be larger than memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from realsys.errors import DataError


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
