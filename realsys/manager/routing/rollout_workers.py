"""The workers of a trial as their heartbeat keys show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from realsys.errors import MALFORMED


class Heartbeat(msgspec.Struct):
    """Value of a heartbeat key.

    ``value``: its text. ``since``: first sight of this incarnation. ``changed``: last change of the value.
    """

    kind: str = ""
    index: int = 0
    host: str = ""
    pid: int = 0
    incarnation: str = ""
    state: str = ""
    counters: dict[str, int] = {}  # messages that the worker refused, by cause
    value: str = ""
    since: float = 0.0
    changed: float = 0.0


class Held(Protocol):
    """A running ticket of either kind: its worker, and the last news of it."""

    worker: str
    incarnation: str
    news_at: float


def observe(values: Mapping[str, str], before: Mapping[str, Heartbeat], now: float) -> dict[str, Heartbeat]:
    """Return the new table of all heartbeat keys (worker name -> JSON). An unreadable value keeps the old row.

    Only values that have changed are decoded.
    """
    table: dict[str, Heartbeat] = {}
    for name, value in values.items():
        old = before.get(name)
        if old is not None and old.value == value:
            table[name] = old
            continue
        try:
            new = msgspec.json.decode(value, type=Heartbeat)
        except MALFORMED:
            new = old or Heartbeat(state="unreadable heartbeat")
        same = old is not None and old.incarnation == new.incarnation
        new.since = old.since if old is not None and same else now
        new.value, new.changed = value, now
        table[name] = new
    return table


def renewed(before: Mapping[str, Heartbeat], after: Mapping[str, Heartbeat]) -> set[str]:
    """Return the workers that are new or gone, or have another incarnation than before."""
    same = {name for name, beat in after.items() if name in before and before[name].incarnation == beat.incarnation}
    return (before.keys() | after.keys()) - same


def incarnation_of(worker: str, workers: Mapping[str, Heartbeat]) -> str:
    """Return the incarnation that the heartbeat of ``worker`` shows, "" without a heartbeat."""
    heartbeat = workers.get(worker)
    return heartbeat.incarnation if heartbeat else ""


def is_lost(held: Held, workers: Mapping[str, Heartbeat]) -> bool:
    """Return True if the worker that holds this ticket is gone or has restarted.

    A ticket that was granted before its worker's first heartbeat is bound to the first incarnation that appears.
    """
    heartbeat = workers.get(held.worker)
    if not held.incarnation:
        held.incarnation = incarnation_of(held.worker, workers)
        return False
    return heartbeat is None or heartbeat.incarnation != held.incarnation
