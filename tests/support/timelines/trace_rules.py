"""Rules of ui.perfetto.dev for the JSON of trace events, as its importer applies them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]
Row = tuple[int, int]  # (pid, tid)

_FIELDS = {
    "X": ("name", "ts", "dur", "pid", "tid"),
    "M": ("name", "pid", "tid", "args"),
    "i": ("name", "ts", "s", "pid", "tid"),
    "s": ("name", "cat", "id", "ts", "pid", "tid"),
    "t": ("name", "cat", "id", "ts", "pid", "tid"),
    "f": ("name", "cat", "id", "ts", "pid", "tid", "bp"),
}


def broken_rules(events: Sequence[Event]) -> list[str]:
    """Return one line for each event that breaks a rule."""
    slices: dict[Row, list[Event]] = defaultdict(list)
    flows: dict[tuple[str, Any], list[Event]] = defaultdict(list)
    problems = [problem for event in events if (problem := _form(event))]
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
        elif event["ph"] in "stf":
            flows[event["cat"], event["id"]].append(event)
    for row, own in slices.items():
        problems += _nesting(row, own)
    for name, own in flows.items():
        problems += _flow(name, own, slices)
    return problems + _unnamed(events, slices)


def _form(event: Event) -> str:
    missing = [name for name in _FIELDS.get(event.get("ph", ""), ("ph",)) if name not in event]
    if missing:
        return f"{event}: lacks {', '.join(missing)}"
    times = [event[name] for name in ("ts", "dur") if name in event]
    return f"{event}: a negative time" if any(time < 0 for time in times) else ""


def _nesting(row: Row, slices: Sequence[Event]) -> list[str]:
    """A span that begins inside of another one must end inside of it."""
    problems, open_ends = [], list[float]()
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        end = _ns(event["ts"]) + _ns(event["dur"])
        while open_ends and open_ends[-1] <= _ns(event["ts"]):
            open_ends.pop()
        if open_ends and end > open_ends[-1]:
            problems.append(f"{row}: {event['name']} at {event['ts']} ends after the span around it")
        open_ends.append(end)
    return problems


def _flow(name: tuple[str, Any], events: Sequence[Event], slices: Mapping[Row, Sequence[Event]]) -> list[str]:
    """A flow begins once, ends once, goes forward, and each of its points is in a span."""
    kinds = "".join(event["ph"] for event in events)
    problems = [] if kinds == "s" + "t" * (len(kinds) - 2) + "f" else [f"flow {name}: {kinds}"]
    times = [event["ts"] for event in events]
    if times != sorted(times):
        problems.append(f"flow {name}: goes back in time")
    for event in events:
        own = slices.get((event["pid"], event["tid"]), ())
        at = _ns(event["ts"])
        if not any(_ns(span["ts"]) <= at < _ns(span["ts"]) + _ns(span["dur"]) for span in own):
            problems.append(f"flow {name}: {event['ph']} at {event['ts']} lies in no span")
    return problems


def _unnamed(events: Sequence[Event], slices: Mapping[Row, Sequence[Event]]) -> list[str]:
    names = {(event["name"], event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
    processes = {pid for pid, _ in slices if ("process_name", pid, 0) not in names}
    rows = {row for row in slices if ("thread_name", *row) not in names}
    return [f"process {pid} has no name" for pid in processes] + [f"row {row} has no name" for row in rows]


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)
