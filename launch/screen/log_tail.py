"""Follows a text file that another process appends to, moves away, or cuts off."""

from __future__ import annotations

import codecs
import os
import sys
from pathlib import Path

_PART = 1 << 20  # bytes


class LogTail:
    """Reader of the new text of one file, which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def skip_to_last(self, lines: int) -> None:
        """Go to the last lines of the file, as far as they are in its last MiB."""
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - _PART))
                end = file.read(_PART)
        except OSError:
            return
        kept = b"".join(end.splitlines(keepends=True)[-lines:]) if lines else b""
        self._offset = size - len(kept)

    def read(self) -> str:
        """Return the text that was added since the last call, up to 1 MiB of it."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # cut off: its text is in another file now
                    self._offset = 0
                file.seek(self._offset)
                data = file.read(_PART)
        except OSError:
            return ""
        self._offset += len(data)
        return self._decoder.decode(data)


def show_new(tail: LogTail) -> None:
    """Print all text that was added."""
    while text := tail.read():
        sys.stdout.write(text)
    sys.stdout.flush()
