"""Names of what a span is for, as several processes write them: attempts, episodes, steps, versions."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

#: request id of a call of the engine (``realsys.rollout.resumable_engine.EngineCall``), and the number of the
#: completion in it
_REQUEST = re.compile(
    r"(?P<attempt>(?:\d{10}|eval-.*-\d{6})\.\d+)\.(?P<episode>\d+)\.(?P<call>\d+)"
    r"\.(?P<trip>\d+)(?:\.(?P<index>\d+))?(?:#(?P<number>\d+))?"
)

_ATTEMPT = re.compile(r"(?:\d{10}|eval-.*-\d{6})\.\d+")


class Completion(NamedTuple):
    """The completion of an episode that a server samples. ``call``: number of the call in its episode."""

    attempt: str
    episode: int
    call: int

    @property
    def unit(self) -> str:
        return f"{self.attempt}/{self.episode}"


@functools.lru_cache(1 << 16)
def completion_of(unit: str) -> Completion | None:
    """Return whose completion a span of a server is for; None if its request is none of a ticket.

    Equal first calls of an attempt's episodes are one request, which has the name of the first of them.
    """
    match = _REQUEST.fullmatch(unit)
    if match is None:
        return None
    offset = int(match["index"] or match["number"] or 0)
    return Completion(match["attempt"], int(match["episode"]) + offset, int(match["call"]))


@functools.lru_cache(1 << 16)
def attempt_of(unit: str) -> str:
    """Return ``ticket.attempt`` of an attempt, an episode or a completion; "" for other units."""
    if (completion := completion_of(unit)) is not None:
        return completion.attempt
    head = unit.partition("/")[0]
    return head if _ATTEMPT.fullmatch(head) else ""


def ticket_of(attempt: str) -> str:
    """Return the ticket of an attempt."""
    return attempt.rpartition(".")[0]


def number_of(unit: str, kind: str) -> int | None:
    """Return N of ``kind``/N; None for other units."""
    head, _, number = unit.partition("/")
    return int(number) if head == kind and number.lstrip("-").isdigit() else None
