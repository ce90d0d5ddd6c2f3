"""Terminal of a command: lines on stdout and stderr, whatever happens to their readers."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table


class Terminal(Console):
    """Console that stays silent once its reader has ended: Ctrl-C in `realsys run | tee log` ends the tee, too."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with open(os.devnull, "wb") as sink:
            os.dup2(sink.fileno(), self.file.fileno())  # the flush at the exit needs an open file


def tell(text: str) -> None:
    """Print a line to stderr."""
    Terminal(stderr=True, emoji=False).print(text, highlight=False, soft_wrap=True, markup=False)


def print_trimmed(console: Console, content: Table | str) -> None:
    """Print a table, or a text with markup. In a file or pipe, its lines have no blanks at their ends."""
    with contextlib.ExitStack() as pipe:
        captured = None if console.is_terminal else pipe.enter_context(console.capture())
        console.print(content, highlight=False)
    for line in captured.get().splitlines() if captured else ():
        console.print(line.rstrip(), highlight=False, markup=False, emoji=False, soft_wrap=True)


class WorkLine:
    """Progress of a long command on stderr: one line that is redrawn on a terminal, else a line every ten seconds."""

    REDRAW_S, PIPED_S = 0.2, 10.0

    def __init__(
        self, command: str, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._command = command
        self._console = console or Terminal(stderr=True, emoji=False)
        self._clock = clock
        self._began = clock()
        self._shown = self._began - self.PIPED_S

    def show(self, done: float, total: float, text: str) -> None:
        """Show ``text``, the share that is done, and the time left, if the last line is old enough."""
        now, share = self._clock(), min(1.0, done / total) if total else 1.0
        if now - self._shown < (self.REDRAW_S if self._console.is_terminal else self.PIPED_S):
            return
        self._shown = now
        minutes, seconds = divmod(round((now - self._began) * (1.0 - share) / share) if share else 0, 60)
        left = f", {minutes}:{seconds:02} left" if share else ""
        line = f"realsys: {self._command}: {text}, {share:.0%}{left}"
        if self._console.is_terminal:
            self.clear()
            self._console.print(line[: self._console.width - 1], end="", highlight=False, markup=False)
        else:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def clear(self) -> None:
        """Remove the line from a terminal, so that results can follow."""
        if self._console.is_terminal:
            self._console.file.write("\r\033[K")
            self._console.file.flush()


@contextlib.contextmanager
def reported(action: str) -> Iterator[None]:
    """Report an OSError and continue: a disk that is full or read-only must not hide how the run ended."""
    try:
        yield
    except OSError as exc:
        tell(f"realsys: cannot {action}: {exc.filename or 'the terminal'}: {exc.strerror}")


# ---- follows a text file that another process appends to, moves away, or cuts off


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
