"""Defects of a user's agent or environment: named with their place, logged once, and loud if they always happen."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from realsys.errors import AgentError, RealsysError
from realsys.rollout.manager_client import RolloutSuperseded

MOST_KNOWN = 1000  # distinct messages that are remembered as logged
MAX_MESSAGE = 500  # characters of an exception's text
MAX_LINE = 2000  # characters of what is told of an error to the manager, and to the head of a group

_LIBRARIES = (
    f"{Path(__file__).resolve().parents[1]}{os.sep}",
    *(f"{Path(sysconfig.get_path(name)).resolve()}{os.sep}" for name in ("stdlib", "purelib", "platlib")),
)


def one_line(text: str, limit: int = MAX_LINE) -> str:
    """Make of any text one line that can be sent: bounded, without characters that have no UTF-8 (lone surrogates)."""
    return " ".join(text.split())[:limit].encode("utf-8", "replace").decode()


def explain(error: BaseException) -> RealsysError:
    """Return the error of an episode: a RealsysError as it is, anything else as AgentError with type and place.

    Of an exception group (a TaskGroup of the agent) the first RealsysError counts, else its first exception.
    """
    leaves = sorted(_leaves(error), key=lambda leaf: (not isinstance(leaf, RolloutSuperseded), not _known(leaf)))
    first = leaves[0]
    if isinstance(first, RealsysError):
        return first
    kind, text = type(first).__name__, one_line(str(first), MAX_MESSAGE)
    place = _place(first)
    return AgentError(f"{kind}: {text} ({place})", defect=f"{kind} at {place}")


def _known(error: BaseException) -> bool:
    return isinstance(error, RealsysError)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _place(error: BaseException) -> str:
    """File and line of the innermost frame in the user's code; of the innermost frame at all if none is."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not str(Path(frame.filename).resolve()).startswith(_LIBRARIES)]
    if not frames:
        return "no traceback"
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


class Defects:
    """The defects that a RolloutWorker has met."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._last = ""  # defect of every episode of the ticket before

    def is_new(self, error: AgentError) -> bool:
        """Return True the first time a message comes, so that it is logged once."""
        message = str(error)
        if message in self._known or len(self._known) >= MOST_KNOWN:
            return False
        self._known.add(message)
        return True

    def repeated(self, episodes: int, errors: Sequence[RealsysError]) -> str:
        """Note the errors of a ticket of ``episodes``; the problem if its defect ended the ticket before it as well.

        A ticket of one episode says nothing: its prompt may be to blame.
        """
        if episodes < 2:
            return ""
        defects = {error.defect if isinstance(error, AgentError) else "" for error in errors}
        defect = defects.pop() if len(errors) == episodes and len(defects) == 1 else ""
        again = bool(defect) and defect == self._last
        self._last = defect
        return f"every episode of two tickets in a row failed with the same error: {errors[0]}" if again else ""
