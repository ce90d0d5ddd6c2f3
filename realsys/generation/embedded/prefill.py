"""Which prefixes to compute next, and from whom to copy what is there already. Pure bookkeeping, no torch.

Prompts of new answers, and prompts with the tokens so far of interrupted ones, wait in one line. A pass takes from its
front what fits the budget, so that decoding goes on between two passes. Tokens that two prompts share are computed
once: by the answers of one request, by continued answers of one prompt, or by prompts with a common beginning. Whoever
shares more with an answer of the same pass than with one that decodes already waits for the next pass, and copies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from realsys.generation.embedded.scheduler import Answer
from realsys.types import I32

#: tokens that make waiting for another answer's prefix worth while, unless it is all there is to compute
MIN_SHARED = 16


@dataclass(frozen=True, slots=True)
class Part:
    """Positions start..stop-1 of an answer, to be computed; the ones before are cached, after a copy from ``donor``."""

    answer: Answer
    start: int
    stop: int
    donor: Answer | None

    @property
    def completes(self) -> bool:
        """Whether the answer can decode after this part."""
        return self.stop == self.answer.length - 1


class PrefixIndex:
    """Answers in lexicographic order of their prompts: who shares most with a prompt is next to its place."""

    def __init__(self, answers: Iterable[Answer] = ()) -> None:
        self._answers = sorted(answers, key=_key)

    def add(self, answer: Answer) -> None:
        self._answers.insert(self._place(answer), answer)

    def longest(self, answer: Answer) -> tuple[Answer | None, int]:
        """Who shares most prompt tokens with ``answer``, and how many positions of its cache are therefore good."""
        best, most = None, 0
        at = self._place(answer)
        for other in self._answers[max(at - 1, 0) : at + 1]:
            # The last token of a sequence is not cached yet.
            shared = min(_common(answer.request.prompt, other.request.prompt), other.length - 1, answer.length - 1)
            if shared > most:
                best, most = other, shared
        return best, most

    def _place(self, answer: Answer) -> int:
        return bisect_left(self._answers, answer.request.key, key=_key)


def plan_pass(waiting: Sequence[Answer], decoding: Iterable[Answer], budget: int) -> list[Part]:
    """The parts of one pass, at least one, of at most ``budget`` tokens together.

    Only the first in line is ever cut, so no more than one answer is cached in part.
    """
    cached, coming = PrefixIndex(decoding), PrefixIndex()
    parts: list[Part] = []
    for answer in waiting:
        start, stop, donor = answer.cached, answer.length - 1, None
        other, shared = cached.longest(answer)
        if shared > start:
            start, donor = shared, other
        soon = coming.longest(answer)[1]
        if soon > start and soon >= min(start + MIN_SHARED, stop):
            continue
        if stop - start > budget:
            if parts:
                break
            stop = start + budget
        budget -= stop - start
        parts.append(Part(answer, start, stop, donor))
        coming.add(answer)
    return parts


def _key(answer: Answer) -> bytes:
    return answer.request.key


def _common(a: I32, b: I32) -> int:
    """Length of the common beginning."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length
