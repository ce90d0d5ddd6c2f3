"""Defects of a user's agent or environment: reported with their place, logged once, and fatal if they repeat."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from realsys.errors import AgentError, RealsysError
from realsys.rollout.manager_client import RolloutSuperseded

MAX_LOGGED = 1000  # distinct messages that are logged
MAX_MESSAGE = 500  # characters of an exception's text
MAX_LINE = 2000  # characters of an error in a report to the manager, and in the record of a group

_LIBRARIES = (
    f"{Path(__file__).resolve().parents[1]}{os.sep}",
    *(f"{Path(sysconfig.get_path(name)).resolve()}{os.sep}" for name in ("stdlib", "purelib", "platlib")),
)


def one_line(text: str, limit: int = MAX_LINE) -> str:
    """Convert any text to one line that can be sent: bounded, without lone surrogates, which UTF-8 cannot encode."""
    return " ".join(text.split())[:limit].encode("utf-8", "replace").decode()


def explain(error: BaseException) -> RealsysError:
    """Return the error of an episode: a RealsysError unchanged, anything else as AgentError with type and place.

    Of an exception group (a TaskGroup of the agent) the first RealsysError counts, else its first exception.
    """

    def priority(leaf: BaseException) -> tuple[bool, bool]:
        return not isinstance(leaf, RolloutSuperseded), not isinstance(leaf, RealsysError)

    first = min(_leaves(error), key=priority)
    if isinstance(first, RealsysError):
        return first
    kind, text = type(first).__name__, one_line(str(first), MAX_MESSAGE)
    place = _place(first)
    return AgentError(f"{kind}: {text} ({place})", defect=f"{kind} at {place}")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _place(error: BaseException) -> str:
    """Return file and line of the innermost frame in the user's code, else of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not str(Path(frame.filename).resolve()).startswith(_LIBRARIES)]
    if not frames:
        return "no traceback"
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


class Defects:
    """Memory of the defects in one RolloutWorker."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._last = ""  # defect of every episode of the last ticket

    def is_new(self, error: AgentError) -> bool:
        """Return True for a message that was not logged before."""
        message = str(error)
        if message in self._logged or len(self._logged) >= MAX_LOGGED:
            return False
        self._logged.add(message)
        return True

    def repeated(self, episodes: int, errors: Sequence[RealsysError]) -> str:
        """Record the errors of a ticket of ``episodes``. Return the problem if the last ticket had the same defect.

        A ticket of one episode is ignored, because its prompt may be the cause.
        """
        if episodes < 2:
            return ""
        defects = {error.defect if isinstance(error, AgentError) else "" for error in errors}
        defect = defects.pop() if len(errors) == episodes and len(defects) == 1 else ""
        again = bool(defect) and defect == self._last
        self._last = defect
        return f"every episode of two tickets in a row failed with the same error: {errors[0]}" if again else ""
