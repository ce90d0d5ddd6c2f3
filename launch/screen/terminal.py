"""Terminal of a command: lines on stdout and stderr, whatever happens to their readers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from rich.console import Console


class Terminal(Console):
    """Console that stays silent once its reader has ended: Ctrl-C in `realsys run | tee log` ends the tee, too."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with open(os.devnull, "wb") as sink:
            os.dup2(sink.fileno(), self.file.fileno())  # the flush at the exit needs an open file


def tell(text: str) -> None:
    """Print a line to stderr."""
    Terminal(stderr=True, emoji=False).print(text, highlight=False, soft_wrap=True, markup=False)


@contextlib.contextmanager
def reported(action: str) -> Iterator[None]:
    """Report an OSError and continue: a disk that is full or read-only must not hide how the run ended."""
    try:
        yield
    except OSError as exc:
        tell(f"realsys: cannot {action}: {exc.filename or 'the terminal'}: {exc.strerror}")
