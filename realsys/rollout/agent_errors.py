"""Defects of a user's agent or environment: reported with their place, logged once, and fatal if they repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from realsys.agent_runner.contract import described
from realsys.errors import AgentError, RealsysError
from realsys.manager.client import RolloutSuperseded

MOST_FAILED = 128  # episodes in a row; an agent that fails 90 % of all reaches it with a probability of 1e-6
MAX_LOGGED = 1000  # distinct messages that are logged
MAX_LINE = 2000  # characters of an error in a report to the manager, and in the record of a group


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
    failed = described(first)
    kind, place = failed["type"], failed["place"]
    return AgentError(f"{kind}: {failed['message']} ({place})", defect=f"{kind} at {place}")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


class Defects:
    """Memory of the defects in one RolloutWorker."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._last = ""  # defect of every episode of the last ticket
        self._failed = Counter[str]()  # defects of the episodes since the last good one

    def is_new(self, error: AgentError) -> bool:
        """Return True for a message that was not logged before."""
        message = str(error)
        if message in self._logged or len(self._logged) >= MAX_LOGGED:
            return False
        self._logged.add(message)
        return True

    def stuck(self, episodes: int, good: int, errors: Sequence[RealsysError]) -> str:
        """Record a training ticket of ``episodes``, some of them ``good``. Return why the run is stuck, or "".

        It is if every episode of two tickets in a row has the same defect, and if the agent has failed too many
        episodes in a row in any way. One episode with a defect proves nothing: its prompt may be the cause.
        """
        defects = [error.defect for error in errors if isinstance(error, AgentError)]
        if good:
            self._last = ""
            self._failed.clear()
            return ""
        self._failed.update(defects)
        same = defects[0] if len(defects) == episodes > 1 and len(set(defects)) == 1 else ""
        again = bool(same) and same == self._last
        self._last = same
        if again:
            return f"every episode of two tickets in a row failed with the same error: {errors[0]}"
        if self._failed.total() < MOST_FAILED:
            return ""
        defect, count = self._failed.most_common(1)[0]
        return f"the agent failed {self._failed.total()} episodes, and none was good; {count} of them: {defect}"
