"""A made-up trial: segments of spans and a step log with chosen times."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from realsys.config.paths import TrialPaths
from realsys.observe import spans
from realsys.observe.spans import SUFFIX, Header, RawSpan
from realsys.observe.timeline.clocked_spans import TimelineSpan, read_timeline

#: unix seconds at which made-up trials begin
START = 1_700_000_000.0


def raw(name: str, begin: float, end: float, unit: str = "", **facts: Any) -> RawSpan:
    """Return a span with times in seconds since the start."""
    return name, round(begin * 1e9), round((end - begin) * 1e9), unit, facts or None


@dataclass
class MadeUpTrial:
    """Writer of a trial. ``wall``: host -> seconds by which its wall clock is wrong."""

    root: Path
    wall: Mapping[str, float] = field(default_factory=dict)

    @property
    def paths(self) -> TrialPaths:
        return TrialPaths(self.root)

    def spans(self, process: str, spans: Sequence[RawSpan], host: str = "a", segment: int = 0) -> Path:
        """Write one segment of a process. Times of the clock of ``host`` begin at the start of the trial."""
        folder = self.paths.spans / process.replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        begin = min((span[1] for span in spans), default=0)
        wall_ns = round((START + self.wall.get(host, 0.0)) * 1e9) + begin
        header = Header(process, "1", 1, host, f"boot-of-{host}", wall_ns, begin)
        path = folder / f"{segment:010}{SUFFIX}"
        path.write_bytes(msgspec.json.encode(header) + b"\n" + msgspec.json.encode(spans) + b"\n")
        return path

    def steps(self, *seconds: Mapping[str, float], end: float = 0.0) -> None:
        """Write a step log with a train step for each of ``seconds``, the parts of its time."""
        at, lines = START + end, []
        for number, parts in enumerate(seconds, start=1):
            total = sum(parts.values())
            at += total if not end else 0.0
            record = {"kind": "train", "time": at, "step": number, "seconds": {**parts, "total": total}}
            lines.append(msgspec.json.encode(record))
        self.root.mkdir(parents=True, exist_ok=True)
        self.paths.steps.write_bytes(b"\n".join(lines) + b"\n")


def small_trial(root: Path, wall: Mapping[str, float] | None = None) -> MadeUpTrial:
    """Write a trial of one step on two hosts: its batch waits for 10 s, and one ticket with two episodes makes it.

    Its last episode waits 1 s for a place in the server, its prompt takes 1 s, its tokens 4 s, its verdict 2 s; then
    the group travels for 1 s. The trainer is on host a, everything else on host b.
    """
    trial = MadeUpTrial(root, wall or {})
    ticket, step, version = "0000000007.0", "step/1", "version/1"
    trial.spans(
        "gserver_manager/0",
        [raw("grant", 1.0, 1.0, ticket), raw("update", 16.0, 18.0, version, server="generation_server/0")],
        "a",
    )
    trial.spans(
        "rollout_worker/0",
        [
            raw("allocate", 0.0, 1.0, wanted=4),
            raw("rollout", 1.0, 10.2, ticket, kind="train"),
            raw("episode", 1.0, 5.0, f"{ticket}/0"),
            raw("generate", 1.0, 4.0, f"{ticket}/0", call=0),
            raw("reward", 4.0, 5.0, f"{ticket}/0"),
            raw("episode", 1.0, 9.0, f"{ticket}/1"),
            raw("generate", 1.0, 7.0, f"{ticket}/1", call=0),
            raw("reward", 7.0, 9.0, f"{ticket}/1"),
            raw("push", 9.0, 10.1, ticket),
            raw("finish", 10.1, 10.2, ticket),
        ],
        "b",
    )
    _serve(trial, ticket, version)
    trial.spans(
        "master_worker/0",
        [
            raw("wait", 0.5, 10.5, step),
            raw("plan", 10.5, 11.0, step),
            raw("call", 11.0, 14.0, step, call="actor_train"),
            raw("copy", 14.0, 14.5, version),
            raw("publish", 14.5, 16.0, version),
            raw("step", 0.5, 15.0, step, tickets="7"),
        ],
        "a",
    )
    trial.spans(
        "model_worker/0",
        [
            raw("receive", 10.0, 10.0, ticket),
            raw("call", 11.1, 13.9, step, call="actor_train"),
            raw("copy", 14.1, 14.4, version),
            raw("write", 14.6, 15.5, version),
        ],
        "a",
    )
    trial.steps({"wait": 10.0, "inf": 0.0, "train": 3.0, "save": 0.5, "publish": 0.0, "checkpoint": 0.0}, end=15.0)
    return trial


def _serve(trial: MadeUpTrial, ticket: str, version: str) -> None:
    rid = f"{ticket}.0.0.0"
    trial.spans(
        "generation_server/0",
        [
            raw("queue", 1.0, 1.5, f"{rid}#0"),
            raw("prefill", 1.5, 2.0, f"{rid}#0"),
            raw("decode", 2.0, 4.0, f"{rid}#0", version=0, tokens=20),
            raw("queue", 1.0, 2.0, f"{rid}#1"),
            raw("prefill", 2.0, 3.0, f"{rid}#1"),
            raw("decode", 3.0, 7.0, f"{rid}#1", version=0, tokens=40),
            raw("stage", 16.0, 17.5, version),
            raw("pause", 17.5, 17.9, version),
        ],
        "b",
    )


# ---- Spans that a test's own process records


@contextlib.contextmanager
def recording(folder: Path) -> Iterator[Callable[[], Sequence[TimelineSpan]]]:
    """Record the spans of the block; the yielded function returns those so far, sorted by begin."""

    def so_far() -> Sequence[TimelineSpan]:
        spans.flush()
        return read_timeline(folder).spans

    spans.start(folder / "worker-0", "worker/0", "1", 1 << 20)
    try:
        yield so_far
    finally:
        spans.stop()


# ---- Rules of ui.perfetto.dev for the JSON of trace events, as its importer applies them


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
