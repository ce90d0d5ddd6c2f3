"""PromptAudit: which prompt a new ticket must have, by the order of the prompts and the curriculum."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from realsys.manager.ledger.events import Finished, Granted, Opened
from realsys.manager.ledger.order import PromptOrder


class PromptAudit:
    """Position in the data, and the success rate of every prompt with a verdict, in per mille."""

    def __init__(self) -> None:
        self._order: PromptOrder | None = None
        self._curriculum: tuple[int, int, float] | None = None
        self._cursor = 0
        self._given_back: deque[int] = deque()  # prompts that may be granted again
        self._rates: dict[int, int] = {}

    def open(self, event: Opened) -> None:
        """Take the settings that decide the order."""
        self._order = PromptOrder(event.seed, event.prompts)
        self._curriculum = event.curriculum

    def start(self, cursor: int, given_back: Sequence[int], rates: Sequence[int]) -> None:
        """Begin at the position of a checkpoint or a snapshot."""
        self._cursor = cursor
        self._given_back.extend(given_back)
        self._rates = {prompt: rate for prompt, rate in enumerate(rates) if rate >= 0}

    def finished(self, prompt: int, event: Finished) -> None:
        """Average the success rate of a group with that of its prompt's groups before."""
        if event.judged:
            rate = round(1000 * event.correct / event.judged)
            before = self._rates.get(prompt)
            self._rates[prompt] = rate if before is None else (before + rate + (rate > before)) // 2

    def granted(self, event: Granted) -> str:
        """Take the prompt of a new ticket. Returns why it is the wrong one, "" if it is right."""
        if event.position < 0:
            if event.prompt_index not in self._given_back:
                return f"prompt {event.prompt_index} was not given back"
            self._given_back.remove(event.prompt_index)
            return ""
        problem = self._misplaced(event)
        self._cursor = max(self._cursor, event.position + 1)
        return problem

    def _misplaced(self, event: Granted) -> str:
        if event.position < self._cursor:
            return f"prompt position {event.position} was granted before"
        if passed := self._wrongly_passed(event.position):
            return f"prompt position {event.position} was granted before {passed[0]}"
        if self._order is not None and self._order.at(event.position) != event.prompt_index:
            return f"prompt {event.prompt_index} instead of {self._order.at(event.position)}"
        return ""

    def _wrongly_passed(self, position: int) -> list[int]:
        """Return the positions before ``position`` that the curriculum, if there is one, had to take."""
        passed = range(self._cursor, position)
        if not passed or self._curriculum is None or self._order is None:
            return list(passed[:1])
        low, high, _ = self._curriculum
        rates = ((at, self._rates.get(self._order.at(at) or 0)) for at in passed)
        return [at for at, rate in rates if rate is None or low <= rate <= high]
