"""Report on who waits for whom in a trial, and on what would help.

    step log ──> times of the steps ──────────────────────┐
    spans ─────> what the last group of each batch did ───┼──> WhyReport: shares that add up to 100 %, use, advice
            └──> use of servers and RolloutWorkers ───────┘

A trial without spans has no parts of the wait, and no use of its processes. The step log alone has the rest.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from realsys.config.dataflow import takes_prompts
from realsys.config.paths import TrialPaths, read_config
from realsys.config.schema import Config
from realsys.errors import ConfigError, RealsysError
from realsys.manager.ledger.tickets import tickets_in
from realsys.observe.percent import apportioned, whole_percents
from realsys.observe.step_log import RECOVERED, StepRecord, last_records, surviving, surviving_steps
from realsys.observe.timeline.clocked_spans import (
    TimelineSpan,
    Window,
    attempt_of,
    bounded_window,
    completion_of,
    number_of,
    read_timeline,
    ticket_of,
)

#: train steps that ``bottleneck`` sums up
LAST = 20
#: percentage of the time that a trainer waits if generation is slower; less than that is the jitter of arrivals
SLOWER = 10
#: (last steps whose spans are read, seconds before the first of them, in which a group of its batch may have begun):
#: the first one whose spans are not too many, because a large run has thousands of spans per second
_READ = ((50, 3600.0), (20, 900.0), (5, 120.0), (1, 0.0))


@dataclass(frozen=True, slots=True)
class ServerUse:
    """Means over the servers of a trial.

    busy     share of the time in which a server computes at least one completion
    running  completions that a server computes at a time
    most     the same, the most that any server computed at a moment
    queued   completions that wait in a server
    paused   share of the time in which a server takes over weights
    staging  share of the time in which a server reads weights while it works
    """

    servers: int = 0
    busy: float = 0.0
    running: float = 0.0
    most: int = 0
    queued: float = 0.0
    paused: float = 0.0
    staging: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerUse:
    """Groups that all RolloutWorkers together play at a time, and further ones for which they wait for tickets.

    ``reasons``: reason that the manager gave for a refusal -> how often.
    """

    workers: int = 0
    playing: float = 0.0
    empty: float = 0.0
    reasons: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WhyReport:
    """Times of train steps, their causes, and advice.

    steps     times of each step, and the parts of its wait in seconds; none without spans
    time      their sum
    waits     parts of the whole wait in seconds, from the steps with spans and scaled to all; empty without spans
    covered   steps whose spans were read: at most the last 50, fewer of a large run
    life      mean seconds of a group by part
    """

    steps: Sequence[tuple[StepTime, Mapping[str, float]]]
    time: StepTime
    waits: Mapping[str, float] = field(default_factory=dict)
    covered: int = 0
    servers: ServerUse = field(default_factory=ServerUse)
    workers: WorkerUse = field(default_factory=WorkerUse)
    life: Mapping[str, float] = field(default_factory=dict)
    advice: Sequence[str] = ()

    @property
    def sentence(self) -> str:
        return sentence(self.time)

    @property
    def wait_percents(self) -> Mapping[str, int]:
        """Return the parts of the wait as percentages of the whole time. They add up to that of the wait."""
        return dict.fromkeys(self.waits, 0) | apportioned(self.waits, self.time.percents["wait"])


def bottleneck(paths: TrialPaths) -> str:
    """Return one sentence about the last train steps: "generation-bound: the trainer waits 47 % of ...".

    "" before the first step. It reads the end of the step log only, so it may be called every few seconds.
    """
    times = last_steps(paths.steps, LAST)
    return sentence(sum_of(times)) if times else ""


def sentence(time: StepTime) -> str:
    """Return which side limits the run, with the share that shows it.

    Batches wait in the trainer's buffer while generation is faster. So a trainer that waits shows that it is slower.
    """
    percents = time.percents
    wait, trained = percents["wait"], percents["inference"] + percents["train"]
    others = {
        "switch-bound": (percents["switch"], "the trainer has a batch, and waits for shared devices,"),
        "publication-bound": (percents["copy"] + percents["publish"], "copying and publishing weights takes"),
        "checkpoint-bound": (percents["checkpoint"], "checkpoints take"),
        "evaluation-bound": (percents["between"], "what lies between two steps, mostly evaluations, takes"),
    }
    name, (most, what) = max(others.items(), key=lambda item: item[1][0])
    if most > max(wait, trained):
        return f"{name}: {what} {most} % of the time"
    if wait >= SLOWER:
        return f"generation-bound: the trainer waits {wait} % of the time for batches, and computes {trained} %"
    return f"training-bound: calls take {trained} % of the time, and the trainer waits {wait} %"


def explain(paths: TrialPaths, first: int | None = None, last: int | None = None) -> WhyReport:
    """Return the report of the train steps ``first`` to ``last``, by default of all. Raises ConfigError without any."""
    times = step_times(surviving_steps(paths.steps))
    chosen = [t for t in times if (first is None or t.step >= first) and (last is None or t.step <= last)]
    if not chosen:
        there = f"the step log has steps {times[0].step} to {times[-1].step}" if times else "no train step has ended"
        raise ConfigError("TRIAL_DIR", str(paths.root), f"{there}: nothing to explain")
    return _with_spans(paths, chosen, sum_of(chosen))


def _with_spans(paths: TrialPaths, times: Sequence[StepTime], total: StepTime) -> WhyReport:
    firsts = [(times[-count:][0], before_s) for count, before_s in _READ]
    windows = [(first.end - first.seconds - before_s, times[-1].end) for first, before_s in firsts]
    chosen = windows.index(bounded_window(paths.spans, windows))
    read, since = times[-_READ[chosen][0] :], windows[chosen][0]
    window = read[0].end - read[0].seconds, read[-1].end
    spans = read_timeline(paths.spans, (since, window[1])).spans
    ways = ways_of(spans)
    found = _steps_of(spans, {time.step for time in read})
    steps, pairs = [], []
    for time in times:
        pair = found.get(time.step)
        parts = parts_of_wait(pair[1], pair[0], ways) if pair is not None else {}
        steps.append((time, scaled(parts, time.parts["wait"])))
        pairs += [pair] if pair is not None else []
    report = WhyReport(steps, total)
    if pairs:
        seen: Window = max(window[0], pairs[0][0].begin), window[1]
        waits: dict[str, float] = {}
        for _, parts in steps:
            for name, seconds in parts.items():
                waits[name] = waits.get(name, 0.0) + seconds
        report = replace(
            report,
            waits=scaled(waits, total.parts["wait"]),
            covered=len(pairs),
            servers=server_use(spans, seen),
            workers=worker_use(spans, seen),
            life=life_of_groups(pairs, ways, since),
        )
    facts = Facts(total, report.wait_percents, report.servers, report.workers, _config(paths), len(times))
    return replace(report, advice=advice(facts))


def scaled(parts: Mapping[str, float], whole: float) -> dict[str, float]:
    """Return ``parts`` scaled so that they add up to ``whole``: the step log and the spans have two stop watches."""
    total = sum(parts.values())
    return {name: seconds * whole / total for name, seconds in parts.items()} if total > 0 else {}


def _steps_of(spans: Sequence[TimelineSpan], numbers: set[int]) -> dict[int, tuple[TimelineSpan, TimelineSpan]]:
    """Return step -> its span and that of its wait. A step that was trained twice counts with its last time."""
    steps: dict[int, TimelineSpan] = {}
    waits: dict[int, TimelineSpan] = {}
    for span in spans:
        number = number_of(span.unit, "step") if span.process.startswith("master_worker/") else None
        if number is None or number not in numbers:
            continue
        if span.name == "wait":
            waits[number] = span
        if span.name == "step" and "tickets" in span.facts:
            steps[number] = span
    return {number: (step, waits[number]) for number, step in steps.items() if number in waits}


def _config(paths: TrialPaths) -> Config | None:
    with contextlib.suppress(RealsysError, OSError):
        return read_config(paths.config)
    return None


# ---- parts of the train steps, from the step log alone
#
# The parts of a step add up to its time, so shares add up to 100 %.
#
# end of step k-1 ──between──> wait ──> switch ──> inf, train (calls) ──> copy ──> publish ──> checkpoint ──> end of k
#                                                                  └ other: plans, statistics, requests


#: name of a part -> what the trainer does in it
PARTS: Mapping[str, str] = {
    "wait": "the batch is not complete: the trainer waits for groups, or for rows of the data set",
    "switch": "a batch is ready, and the servers still use the devices that they share",
    "inference": "calls that compute log-probs, values and scores",
    "train": "calls that train",
    "copy": "weights are copied to host memory",
    "publish": "the publication of the version before is not done, or the manager is told",
    "checkpoint": "checkpoint or export",
    "other": "plans, transfers, statistics",
    "between": "evaluations and what else lies between two steps",
}
#: name in the step log -> name of the part
_IN_LOG = {"wait": "wait", "inf": "inference", "train": "train", "save": "copy"} | {
    name: name for name in ("switch", "publish", "checkpoint")
}
#: bytes at the end of a step log that ``last_steps`` reads
_TAIL = 256 * 1024


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of one train step. ``parts``: seconds by name, in the order of PARTS; they add up to ``seconds``."""

    step: int
    end: float  # unix seconds
    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def share(self, part: str) -> float:
        return self.parts[part] / self.seconds if self.seconds else 0.0

    @property
    def percents(self) -> Mapping[str, int]:
        """Return the parts as whole percentages that add up to 100. Every text and table shows these."""
        return whole_percents(self.parts, self.seconds)


def step_times(records: Iterable[StepRecord]) -> list[StepTime]:
    """Return the times of the train records, in order. A record without readable times is left out."""
    times: list[StepTime] = []
    before: StepTime | None = None
    for record in records:
        if record["kind"] == RECOVERED or record.get("phase") == "connect":
            before = None  # the trainer started again: the time since the last step is no part of a step
        if record["kind"] == "train" and (made := _step_time(record, before)) is not None:
            times.append(made)
            before = made
    return times


def sum_of(times: Sequence[StepTime]) -> StepTime:
    """Return the sum of several steps as one, with the number of the last."""
    parts = {name: sum(time.parts[name] for time in times) for name in PARTS}
    return StepTime(times[-1].step if times else 0, times[-1].end if times else 0.0, parts)


def last_steps(path: Path, count: int) -> list[StepTime]:
    """Return the times of the last ``count`` train steps of a step log. Reads its end only; [] without a log."""
    records = last_records(path, _TAIL)
    return step_times(surviving(lambda: records))[-count:]


def _step_time(record: StepRecord, before: StepTime | None) -> StepTime | None:
    seconds, end, step = record.get("seconds"), record.get("time"), record.get("step")
    if not isinstance(seconds, dict) or not isinstance(end, int | float) or not isinstance(step, int):
        return None
    parts = dict.fromkeys(PARTS, 0.0)
    for name, part in _IN_LOG.items():
        parts[part] = max(0.0, _number(seconds.get(name)))
    total = max(_number(seconds.get("total")), sum(parts.values()))
    parts["other"] = total - sum(parts.values())
    if before is not None:
        parts["between"] = max(0.0, end - total - before.end)
    return StepTime(step, float(end), parts)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


# ---- use of both sides of a trial in a time, from spans. Pure


def server_use(spans: Iterable[TimelineSpan], window: Window) -> ServerUse:
    """Return the use of the servers in ``window``."""
    by_server: dict[str, list[TimelineSpan]] = {}
    for span in spans:
        if span.process.startswith("generation_server/"):
            by_server.setdefault(span.process, []).append(span)
    if not by_server or window[1] <= window[0]:
        return ServerUse()
    sums: defaultdict[str, float] = defaultdict(float)
    most = 0
    for own in by_server.values():
        computing = [span for span in own if span.name in {"prefill", "decode"}]
        sums["busy"] += _covered(computing, window)
        sums["running"] += _seconds(computing, window)
        most = max(most, _most_at_once(computing, window))
        for name, part in (("queued", "queue"), ("paused", "pause"), ("staging", "stage")):
            sums[name] += _seconds((span for span in own if span.name == part), window)
    whole = len(by_server) * (window[1] - window[0])
    return ServerUse(
        servers=len(by_server),
        busy=sums["busy"] / whole,
        running=sums["running"] / whole,
        most=most,
        queued=sums["queued"] / whole,
        paused=sums["paused"] / whole,
        staging=sums["staging"] / whole,
    )


def worker_use(spans: Iterable[TimelineSpan], window: Window) -> WorkerUse:
    """Return the use of the RolloutWorkers in ``window``."""
    playing = empty = 0.0
    workers: set[str] = set()
    reasons: Counter[str] = Counter()
    for span in spans:
        if span.name == "rollout":
            playing += _overlap(span, window)
            workers.add(span.process)
        elif span.name == "allocate":
            empty += _overlap(span, window) * int(span.facts.get("wanted", 0))
            workers.add(span.process)
            if (reason := span.facts.get("reason")) and _overlap(span, window):
                reasons[str(reason)] += 1
    whole = max(window[1] - window[0], 1e-9)
    return WorkerUse(len(workers), playing / whole, empty / whole, dict(reasons))


def life_of_groups(
    steps: Sequence[tuple[TimelineSpan, TimelineSpan]], ways: Ways, since: float = float("-inf")
) -> dict[str, float]:
    """Return the mean seconds of a trained group by part, from its grant to the end of its step.

    ``steps``: (step, wait) of each. Besides the parts of a wait: ``buffered`` until its batch is complete, ``trained``.
    A group whose rollout is not in the spans, or began before ``since``, is left out: its spans are not complete.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    groups = [
        (attempt, step, wait)
        for step, wait in steps
        for attempt in groups_of_batch(step, ways)
        if any(span.name == "rollout" and span.begin >= since for span in ways.attempts[attempt])
    ]
    for attempt, step, wait in groups:
        for name, begin, end in way_of_group(attempt, ways):
            if name == "claim":
                sums["buffered"] += max(0.0, wait.end - begin)
            elif name != "ticket":
                sums[name] += end - begin
        sums["trained"] += step.end - wait.end
    return {name: seconds / len(groups) for name, seconds in sums.items() if seconds > 0}


def _overlap(span: TimelineSpan, window: Window) -> float:
    return max(0.0, min(span.end, window[1]) - max(span.begin, window[0]))


def _seconds(spans: Iterable[TimelineSpan], window: Window) -> float:
    return sum(_overlap(span, window) for span in spans)


def _covered(spans: Iterable[TimelineSpan], window: Window) -> float:
    """Return the seconds of ``window`` in which at least one span runs. ``spans``: sorted by begin."""
    covered, reached = 0.0, window[0]
    for span in spans:
        begin, end = max(span.begin, reached), min(span.end, window[1])
        if end > begin:
            covered += end - begin
        reached = max(reached, end)
    return covered


def _most_at_once(spans: Iterable[TimelineSpan], window: Window) -> int:
    """Return how many of ``spans`` run at the fullest moment of ``window``."""
    changes = []
    for span in spans:
        if _overlap(span, window) > 0:
            changes += [(span.begin, 1), (span.end, -1)]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


# ---- advice on how to make a trial faster. Pure rules over the times of its steps and the use of its processes
#
# Each line names the cause, the setting, and at most how much it can gain: the percentage of the time that would be
# saved if the cause vanished. The rules do not know what a change costs.


#: whole percentage of the time below which a cause is not worth a line
WORTH = 5
#: a server that computes less than this share of the completions of its fullest moment has room
FEW = 0.5
#: waiting completions, as a share of those at its fullest moment, from which a server is called full
QUEUED = 0.1


@dataclass(frozen=True, slots=True)
class Facts:
    """Input of the rules. ``waits``: percentage of the time by part of the trainer's wait; empty without spans."""

    time: StepTime
    waits: Mapping[str, int]
    servers: ServerUse
    workers: WorkerUse
    config: Config | None
    steps: int = 1


def advice(facts: Facts) -> list[str]:
    """Return what would help, the largest gain first."""
    samples = True
    with contextlib.suppress(RealsysError):
        samples = facts.config is None or takes_prompts(facts.config)
    found = [*(_of_waits(facts) if samples else ()), *_of_trainer(facts, samples=samples)]
    found.sort(key=lambda item: -item[0])
    return [f"{text} (gains at most {gain} %)" for gain, text in found if gain >= WORTH]


def _of_waits(facts: Facts) -> Iterator[tuple[int, str]]:
    waits = facts.waits
    if not waits:
        yield facts.time.percents["wait"], "the trainer waits for generation: give generation more devices (allocation)"
        return
    yield waits.get("decode", 0) + waits.get("prefill", 0) + waits.get("queue", 0), _about_servers(facts)
    yield waits.get("ticket", 0), _about_tickets(facts)
    services = facts.config.rollout.reward.services if facts.config is not None else 0
    how = "rollout.reward.services" if services else "rollout.reward.processes, or rollout.reward.services"
    yield waits.get("reward", 0), f"batches wait for verdicts: increase {how}, or make the verifier faster"
    yield waits.get("tool", 0) + waits.get("agent", 0), "batches wait for the agent: make it and its tools faster"
    yield waits.get("route", 0), "calls wait for a server that may serve: see its state on the status page"
    yield waits.get("push", 0) + waits.get("claim", 0), "batches wait for the trainer's network and the manager"
    yield waits.get("transit", 0), "requests wait between RolloutWorker and server: start more rollout.workers"


def _about_servers(facts: Facts) -> str:
    servers = facts.servers
    load = f"{servers.running:.0f} completions run in a server on average, {servers.most} at most"
    if servers.queued > QUEUED * servers.most:
        full = f"{servers.queued:.0f} completions wait in each server"
        return f"servers are full ({full}, {load}): add servers (allocation), or let each run more"
    if servers.running < FEW * servers.most:
        return f"batches wait for their last completions while servers have room ({load}): {_more_ahead(facts)}"
    return f"batches wait for completions ({load}): give generation more devices (allocation), or shorten completions"


def _more_ahead(facts: Facts) -> str:
    most = facts.config.asynchronous.max_staleness if facts.config is not None else 0
    return (
        f"let generation run further ahead (asynchronous.max_staleness, now {most}; rollout.max_concurrent), "
        "or shorten the longest completions (generation.sampling.max_new_tokens)"
    )


def _about_tickets(facts: Facts) -> str:
    reasons = facts.workers.reasons
    if reasons and max(reasons, key=lambda name: reasons[name]) != "staleness":
        often = max(reasons, key=lambda name: reasons[name])
        return f"RolloutWorkers get no tickets (most often: {often})"
    return f"RolloutWorkers wait for tickets, because of the bound on staleness: {_more_ahead(facts)}"


def _of_trainer(facts: Facts, *, samples: bool) -> Iterator[tuple[int, str]]:
    percents, steps = facts.time.percents, facts.steps
    switch_s, step_s = facts.time.parts["switch"] / steps, facts.time.seconds / steps
    yield (
        percents["switch"],
        f"the devices change hands: {switch_s:.1f} s of {step_s:.1f} s per step: train several batches in a turn (a "
        "larger asynchronous.max_staleness), or give servers devices of their own (allocation)",
    )
    yield percents["publish"], "the trainer waits for the publication of the version before: use a faster disk"
    yield percents["copy"], "copying weights to host memory takes long"
    yield percents["checkpoint"], "checkpoints take long: increase checkpoint.every_steps"
    yield percents["between"], "evaluations hold up training: lower evaluation.every_problems, or make them rarer"
    if percents["wait"] >= WORTH or not samples:
        return
    calls = percents["inference"] + percents["train"]
    empty = 100 * facts.workers.empty / max(1e-9, facts.workers.empty + facts.workers.playing)
    spare = f", which has {empty:.0f} % of its places empty" if empty >= WORTH else ""
    yield calls, f"training is the slower side: move devices from generation to training (allocation){spare}"


# ---- the way of an episode through all processes, and the causes of the trainer's waits. Pure
#
# grant ──> rollout ──> episode ──> generate ──> queue, prefill, decode on a server ──> reward, tool ──> push
# (manager)  (RolloutWorker)                     (GenerationServer)                     (RolloutWorker)  │
#     ┌──────────────────────────────────────────────────────────────────────────────────────────────────┘
#     └──> receive ──> step ──> call ──> publish ──> pause
#          (ModelWorker) (MasterWorker) (ModelWorker) (MasterWorker) (GenerationServer)


_OF_ATTEMPT = frozenset({"grant", "rollout", "push", "finish", "receive"})
_ORDER = {name: place for place, name in enumerate(("grant", "rollout", "episode", "generate", "queue"))}


@dataclass(slots=True)
class TrainedIn:
    """A train step and the spans that follow it, in order. ``step`` has the tickets in its facts."""

    step: TimelineSpan
    calls: list[TimelineSpan] = field(default_factory=list)  # that train, on ModelWorkers
    publish: TimelineSpan | None = None
    pauses: list[TimelineSpan] = field(default_factory=list)  # servers that take over its version


@dataclass(slots=True)
class Ways:
    """Spans by attempt, episode and ticket."""

    attempts: dict[str, list[TimelineSpan]] = field(default_factory=dict)  # ticket.attempt -> its own spans
    episodes: dict[str, list[TimelineSpan]] = field(default_factory=dict)  # ticket.attempt/episode -> its own spans
    trained: dict[str, TrainedIn] = field(default_factory=dict)  # ticket -> the step that trained it
    attempts_of: dict[str, list[str]] = field(default_factory=dict)  # ticket -> its attempts
    episodes_of: dict[str, list[str]] = field(default_factory=dict)  # ticket.attempt -> its episodes

    def of_episode(self, episode: str) -> list[TimelineSpan]:
        """Return the spans of an episode and of what its group becomes, in order of their begin."""
        attempt = attempt_of(episode)
        before = [span for span in self.attempts.get(attempt, []) if span.name != "finish"]
        own = sorted([*before, *self.episodes.get(episode, [])], key=_place)
        return [*own, *self._after(attempt)]

    def of_ticket(self, ticket: str) -> list[TimelineSpan]:
        """Return all spans of a ticket: its attempts, their episodes, its step and the version of that step."""
        attempts = self.attempts_of.get(ticket, [])
        spans = [span for attempt in attempts for span in self.attempts[attempt]]
        spans += [span for a in attempts for episode in self.episodes_of.get(a, []) for span in self.episodes[episode]]
        if (trained := self.trained.get(ticket)) is not None:
            spans += [trained.step, *trained.calls, *_present(trained.publish), *trained.pauses]
        return sorted(spans, key=lambda span: (span.begin, -span.end))

    def _after(self, attempt: str) -> list[TimelineSpan]:
        """Return step, call, publication and one pause. Only an attempt that was received can be the trained one."""
        trained = self.trained.get(ticket_of(attempt))
        own = self.attempts.get(attempt, [])
        if trained is None or not any(span.name == "push" for span in own):
            return []
        receivers = {span.process for span in own if span.name == "receive"}
        calls = [span for span in trained.calls if span.process in receivers] or trained.calls
        return [trained.step, *calls[-1:], *_present(trained.publish), *trained.pauses[:1]]


def ways_of(spans: Sequence[TimelineSpan]) -> Ways:
    """Sort spans by attempt, episode and ticket."""
    ways = Ways()
    for span in spans:
        if span.name in _OF_ATTEMPT:
            if attempt := attempt_of(span.unit):
                ways.attempts.setdefault(attempt, []).append(span)
        elif (completion := completion_of(span.unit)) is not None:
            ways.episodes.setdefault(completion.unit, []).append(span)
        elif attempt_of(span.unit):
            ways.episodes.setdefault(span.unit, []).append(span)
    for attempt in ways.attempts:
        ways.attempts_of.setdefault(ticket_of(attempt), []).append(attempt)
    for episode in ways.episodes:
        ways.episodes_of.setdefault(attempt_of(episode), []).append(episode)
    ways.trained = dict(_trained(spans))
    return ways


def _trained(spans: Sequence[TimelineSpan]) -> Iterator[tuple[str, TrainedIn]]:
    """Yield (ticket, its step). A step that was undone and trained again counts with its last time."""
    steps: dict[int, TrainedIn] = {}
    for span in spans:
        number = number_of(span.unit, "step")
        if span.name == "step" and number is not None and "tickets" in span.facts:
            steps[number] = TrainedIn(span)
    for span in spans:
        match span.name:
            case "call" if (number := number_of(span.unit, "step")) in steps and (
                span.process.startswith("model_worker") and str(span.facts.get("call", "")).endswith("_train")
            ):
                if span.begin >= steps[number].step.begin:
                    steps[number].calls.append(span)
            case "publish" if (number := number_of(span.unit, "version")) in steps:
                steps[number].publish = span
            case "pause" if (number := number_of(span.unit, "version")) in steps:
                if span.begin >= steps[number].step.begin:
                    steps[number].pauses.append(span)
    # A step that a roll back undid may have had tickets of a later step with a lower number: the last in time counts.
    for trained in sorted(steps.values(), key=lambda trained: trained.step.begin):
        for ticket in tickets_in(str(trained.step.facts["tickets"])):
            yield ticket, trained


def _place(span: TimelineSpan) -> tuple[float, int]:
    return span.begin, _ORDER.get(span.name, len(_ORDER))


def _present(span: TimelineSpan | None) -> list[TimelineSpan]:
    return [] if span is None else [span]


def ticket_named(text: str) -> str:
    """Return the ticket that a user means by ``text``: an id, its number, ``ticket.attempt`` or an episode."""
    ticket = ticket_of(attempt_of(text)) or text
    return ticket.zfill(10) if ticket.isdigit() else ticket


# ---- causes of the trainer's waits: the way of the group that completed each batch
#
#     trainer    |<───────────────────── wait ─────────────────────>|
#     last group    ticket │ route │ queue │ prefill │ decode │ reward │ push │ claim
#
# A batch is complete when its last group is stored. What that group did at each moment of the wait is what the trainer
# waited for. So the parts of a wait add up to the wait. Within the group it is the episode that ended last.


#: part of a wait -> what the last group was doing
WAITS: Mapping[str, str] = MappingProxyType(
    {
        "ticket": "its ticket was not granted yet",
        "route": "it waited for a server that may serve",
        "queue": "its completion waited in a server",
        "prefill": "a server computed its prompt, or computed it again after a weight update",
        "decode": "a server sampled its tokens",
        "transit": "its request was between RolloutWorker and server",
        "tool": "a tool of its agent ran",
        "agent": "its agent itself worked",
        "reward": "its verdict was computed",
        "push": "it was sent to the trainer",
        "claim": "it was stored, and the batch was claimed at the manager",
        "unknown": "its spans are not there any more",
    }
)
#: name of a span inside of an episode -> part; a later entry is more exact than an earlier one
_INSIDE = {
    "generate": "transit",
    "queue": "queue",
    "prefill": "prefill",
    "decode": "decode",
    "route": "route",
    "reward": "reward",
    "tool": "tool",
}
_RANK = {name: place for place, name in enumerate(_INSIDE)}


def parts_of_wait(wait: TimelineSpan, step: TimelineSpan, ways: Ways) -> dict[str, float]:
    """Return the seconds of ``wait`` by part; they add up. ``step`` has the tickets of the batch in its facts."""
    groups = groups_of_batch(step, ways)
    last = max(groups, key=lambda attempt: _stored(ways.attempts[attempt]), default=None)
    if last is None:
        return {"unknown": wait.seconds}
    parts = dict.fromkeys(WAITS, 0.0)
    for name, begin, end in way_of_group(last, ways):
        parts[name] += max(0.0, min(end, wait.end) - max(begin, wait.begin))
    # Whatever no span covers, such as the time between two processes.
    parts["unknown"] += max(0.0, wait.seconds - sum(parts.values()))
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def groups_of_batch(step: TimelineSpan, ways: Ways) -> list[str]:
    """Return the attempts whose groups the batch of ``step`` has: of each ticket the one that was pushed last."""
    groups = []
    for ticket in tickets_in(str(step.facts.get("tickets", ""))):
        pushed = [
            (span.end, attempt)
            for attempt in ways.attempts_of.get(ticket, ())
            for span in ways.attempts[attempt]
            if span.name == "push" and span.begin <= step.end
        ]
        if pushed:
            groups.append(max(pushed)[1])
    return groups


def _stored(spans: Iterable[TimelineSpan]) -> float:
    """Return when the group of an attempt was stored: at its notice, or else at the end of its push."""
    ends = {span.name: span.end for span in spans}
    return ends.get("receive", ends.get("push", 0.0))


def way_of_group(attempt: str, ways: Ways) -> list[tuple[str, float, float]]:
    """Split all of time by what the group of an attempt did: (part, begin, end), without overlaps."""
    own = ways.attempts[attempt]
    push = max((span for span in own if span.name == "push"), key=lambda span: span.end)
    stored = max(push.begin, min(_stored(own), push.end))
    episodes = [ways.episodes[episode] for episode in ways.episodes_of.get(attempt, ())]
    rollout = [span.begin for span in own if span.name == "rollout"]
    # A RolloutWorker that was killed has not recorded its rollout: nothing tells when the ticket was granted.
    before = "ticket" if rollout else "unknown"
    begin = min([*rollout, *(span.begin for spans in episodes for span in spans if not rollout), push.begin])
    pieces = [(before, float("-inf"), begin), ("push", push.begin, stored), ("claim", stored, float("inf"))]
    if not episodes:
        return [*pieces, ("unknown", begin, push.begin)]
    last = max(episodes, key=lambda spans: max(span.end for span in spans))
    return [*pieces, *split(last, begin, push.begin)]


def split(spans: Sequence[TimelineSpan], begin: float, end: float) -> list[tuple[str, float, float]]:
    """Split ``begin`` to ``end`` by the spans of an episode: at each moment the most exact one; else ``agent``."""
    inside = [span for span in spans if span.name in _INSIDE]
    cuts = sorted({begin, end, *(t for span in inside for t in (span.begin, span.end) if begin < t < end)})
    pieces = []
    for left, right in pairwise(cuts):
        middle = (left + right) / 2
        names = [span.name for span in inside if span.begin <= middle < span.end]
        part = _INSIDE[max(names, key=_RANK.__getitem__)] if names else "agent"
        pieces.append((part, left, right))
    return pieces
