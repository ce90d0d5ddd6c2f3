"""The workers of a trial as their heartbeat keys show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from realsys.errors import MALFORMED


class Heartbeat(msgspec.Struct):
    """Value of a heartbeat key. ``since``: when this incarnation was first seen; ``changed``: its last change."""

    kind: str = ""
    index: int = 0
    host: str = ""
    pid: int = 0
    incarnation: str = ""
    state: str = ""
    time: float = 0.0  # when the worker wrote it, if it says so
    counters: dict[str, int] = {}  # what it refused so far, by what was wrong
    since: float = 0.0
    changed: float = 0.0


class Held(Protocol):
    """A running ticket of either kind: who has it, and when it was last heard of."""

    worker: str
    incarnation: str
    news_at: float


def observe(values: Mapping[str, str], before: Mapping[str, Heartbeat], now: float) -> dict[str, Heartbeat]:
    """All heartbeat keys (worker name -> JSON) as the new table. An unreadable value keeps what was known before."""
    table: dict[str, Heartbeat] = {}
    for name, value in values.items():
        old = before.get(name)
        try:
            new = msgspec.json.decode(value, type=Heartbeat)
        except MALFORMED:
            new = old or Heartbeat(state="unreadable heartbeat")
        same = old is not None and old.incarnation == new.incarnation
        new.since = old.since if old is not None and same else now
        new.changed = now
        table[name] = new
    return table


def incarnation_of(worker: str, workers: Mapping[str, Heartbeat]) -> str:
    """As its heartbeat says; "" while it has none."""
    info = workers.get(worker)
    return info.incarnation if info else ""


def is_lost(held: Held, workers: Mapping[str, Heartbeat]) -> bool:
    """Whether the worker that holds this ticket has gone or restarted.

    A ticket granted before its worker's heartbeat was seen is bound to the first incarnation that is.
    """
    info = workers.get(held.worker)
    if not held.incarnation:
        held.incarnation = incarnation_of(held.worker, workers)
        return False
    return info is None or info.incarnation != held.incarnation
