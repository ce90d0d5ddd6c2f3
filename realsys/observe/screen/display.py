"""Shows a running trial: a live display on a terminal, one line per step otherwise."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from realsys.algorithm.token_losses import WARN_SHARE
from realsys.config.allocation import has_agents, parse_allocation
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.observe.evaluation_records import headline
from realsys.observe.percent import percent
from realsys.observe.screen.plain import PlainView, ServiceView, address_lines, model_line, models_of
from realsys.observe.screen.progress import Record, TrialProgress, mean, number
from realsys.observe.screen.text_figures import (
    curve_text,
    failures_text,
    fmt,
    memory_briefly,
    rate,
    time_split,
    untrained_shares,
)
from realsys.observe.step_log import read_events

_RECENT_NOTES = 8


class View(Protocol):
    """Display of the progress of a run. A context manager: it owns the terminal while it is open."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def note(self, text: str) -> None: ...
    def refresh(self, progress: TrialProgress, new: Iterable[Record] = ()) -> None:
        """Show ``progress``; ``new`` are its records that were not shown yet."""
        ...


def make_view(console: Console, config: Config, paths: TrialPaths, *, plain: bool) -> View:
    """Make a live view on a terminal, and a plain one for a file, a pipe or on request."""
    if plain or not console.is_terminal:
        return ServiceView(console) if config.is_service else PlainView(console)
    return LiveView(console, config, paths)


class LiveView:
    """View that redraws the screen once a second."""

    def __init__(self, console: Console, config: Config, paths: TrialPaths) -> None:
        self._config, self._paths = config, paths
        self._expected = expected_workers(config)
        self._started = time.time()
        self._progress = TrialProgress()
        self._notes: deque[str] = deque(maxlen=_RECENT_NOTES)
        self._live = Live(console=console, auto_refresh=False, get_renderable=lambda: self, transient=False)

    def __enter__(self) -> Self:
        # The start of the run, also for a display that is opened later.
        starts = [event.time for event in read_events(self._paths.events) if event.kind == "start"]
        self._started = starts[-1] if starts else self._started
        self._live.start(refresh=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.refresh()
        self._live.stop()

    def note(self, text: str) -> None:
        # A path of the trial is written from its folder on: else it would hide the cause on a narrow terminal.
        self._notes.append(f"{time.strftime('%H:%M:%S')} {text.replace(f'{self._paths.root}/', '')}")
        self._live.refresh()

    def refresh(self, progress: TrialProgress, new: Iterable[Record] = ()) -> None:
        self._progress = progress
        self._live.refresh()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        config = self._config
        frame = Frame(
            f"{config.experiment}/{config.trial}",
            str(self._paths.root),
            config.asynchronous.max_staleness,
            self._expected,
            list(self._notes),
            max(0.0, time.time() - self._started),
            max(0.0, time.time() - (self._progress.phase_since or self._started)),
        )
        width, height = options.size  # the last column and row stay free: a terminal would scroll
        for line in lines(self._progress, frame, width - 1, height - 1):
            yield from line.render(console)
            yield Segment.line()


def expected_workers(config: Config) -> list[str]:
    """Return the names of the processes whose heartbeats the manager sees, in the order of their start."""
    allocation, plays = parse_allocation(config.allocation), has_agents(config)
    counts = {
        "gserver_manager": 1,
        "generation_server": allocation.inference.data,
        "model_worker": allocation.workers,
        "reward_service": config.rollout.reward.services if plays else 0,
        "rollout_worker": config.rollout.workers if plays else 0,
    }
    return [f"{kind}/{index}" for kind, count in counts.items() for index in range(count)]


# ---- lines of the live display, for a terminal of any size. Pure
#
#     title, elapsed time
#     phase, bar, time left
#     address of the status page
#     notes                          the newest ones, in full
#     training | asynchrony          side by side
#     step time
#     servers                        a line for all, then those in trouble first, as many as fit
#
# If the terminal is low, lines are left out from the bottom: server rows first, then rows of the two tables.


_RECENT_STEPS = 8
_LABEL = 10  # width of a row's name
_NOTE_LINES = 4  # rows of one note at most
_GAP = 2
#: shown when the algorithm has a critic or a reference
_OF_OTHER_MODELS = (
    ("explained", "critic_train/explained_variance"),
    ("KL to ref", "kl_ref_mean"),
    ("KL to ref", "advantages/kl_ref_mean"),
)
#: reason why the manager grants nothing, in words
_CLOSED = {
    "staleness": "waits for the trainer (bound)",
    "exhausted": "all groups granted",
    "nothing_submitted": "waits for the training script to submit prompts",
    "no_server": "no server has weights yet",
    "asleep": "waits for servers that share devices",
    "paused": "paused",
}
#: states of a server, the worst first; others are between these and the calm ones
_TROUBLE = ("quarantined", "suspected")
_CALM = ("registered", "draining", "updating", "ready", "serving")

#: phases in which processes start and load their models
_BEFORE = ("starting", "connect", "load")

Row = tuple[str, str | Text]


@dataclass(frozen=True, slots=True)
class Frame:
    """Content of the display besides the progress.

    name      experiment/trial
    folder    of the trial, shown until there is a status page
    max_staleness   bound on the staleness
    expected  names of the worker processes
    """

    name: str
    folder: str
    max_staleness: int
    expected: Sequence[str] = ()
    notes: Sequence[str] = ()
    elapsed_s: float = 0.0
    phase_s: float = 0.0  # since the phase began


def lines(progress: TrialProgress, frame: Frame, width: int, height: int) -> list[Text]:
    """Return at most ``height`` lines of at most ``width`` cells.

    Head and notes are left out last: a terminal of 9 rows has room for both.
    """
    clock = _clock(frame.elapsed_s)
    name = f"realsys  {frame.name}"
    title = Text(set_cell_size(name, max(0, width - len(clock) - 1)) + " " + clock, "bold")
    address = f"status page  {progress.page}" if progress.address else f"folder  {frame.folder}"
    waits = []
    if progress.phase in _BEFORE and (missing := _missing(progress.status, frame.expected)):
        waits = _wrapped(Text(f"waits for {', '.join(missing)}", "dim"), width, 2)
    head = [_cut(title, width), _cut(_phase(progress, frame), width), *waits, *_wrapped(Text(address), width, 2)]
    notes = _notes(frame, width, max(2, height // 4))
    body = _clients(progress, width) or _side_by_side(
        _training(progress), _asynchrony(progress, frame.max_staleness), width
    )
    time = [_cut(Text.assemble(("step time  ", "dim"), time_split(_recent(progress.train))), width)]
    servers = _servers(progress.status, width)
    room = height - len(head) - len(notes)
    fixed = [*(time if progress.train else []), *servers[:1]][: max(0, room)]
    body = body[: max(0, room - len(fixed))]
    room -= len(body) + len(fixed)
    rows = servers[1:]
    if len(rows) > room:
        left = len(rows) - max(0, room - 1)
        rows = [*rows[: max(0, room - 1)], Text(f"  and {left} more", "dim")] if room > 0 else []
    room -= len(rows)
    blocks = [block for block in (head, notes, body, [*fixed, *rows]) if block]
    spaces = [[Text()] if number < room else [] for number in range(len(blocks) - 1)]
    shown = itertools.chain(*itertools.chain(*itertools.zip_longest(blocks, spaces, fillvalue=[])))
    return list(itertools.islice(shown, max(0, height)))


def _clients(progress: TrialProgress, width: int) -> list[Text]:
    """Return how clients connect, and a line for each of their models; [] if the run is not for clients."""
    rows = [Text(model_line(model)) for model in models_of(progress)]
    return [_cut(text, width) for text in [*(Text(line, "bold") for line in address_lines(progress)), *rows]]


def _cut(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    return text


def _phase(progress: TrialProgress, frame: Frame) -> Text:
    """Return the phase with its bar."""
    done, total = progress.step
    text = Text.assemble((f"{progress.phase:<9}", "bold cyan"))
    if progress.phase in _BEFORE:
        total = len(frame.expected)
        done = total - len(_missing(progress.status, frame.expected))
        text.append_text(_bar(done, total, 30)).append(f" {done}/{total} processes are ready")
        return text.append(f", for {_clock(frame.phase_s)}")
    if progress.phase == "evaluate" and (counts := evaluation_counts(progress.status)):
        done, total = counts
        return text.append_text(_bar(done, total, 30)).append(f" {done:,}/{total:,} completions")
    if progress.phase == "train" and not progress.train:
        return text.append(f"the first batch, for {_clock(frame.phase_s)}")
    if progress.phase in ("warmup", "train"):
        left = _remaining(progress)
        text.append_text(_bar(done, total, 30)).append(f" {done}/{total} steps")
        return text.append(f"  {left} left" if left else "")
    return text if progress.phase == "done" else text.append(f"for {_clock(frame.phase_s)}")


def _missing(status: Record, expected: Sequence[str]) -> list[str]:
    """Return the processes that are not ready: `model_worker/0 (loading)`; without a heartbeat it has no state."""
    workers = status.get("workers")
    states = {f"{row.get('kind')}/{row.get('index')}": str(row.get("state", "")) for row in _rows(workers)}
    ready = ("serving", "rolling out")
    return [
        f"{name} ({states[name]})" if states.get(name) else name for name in expected if states.get(name) not in ready
    ]


def evaluation_counts(status: Record) -> tuple[int, int] | None:
    """Return (completions that have ended, all completions) of the evaluations that run; None without any."""
    evaluations = status.get("evaluations")
    ended = asked = 0
    for state in evaluations.values() if isinstance(evaluations, Mapping) else ():
        done, failed, total = (int(number(state, key) or 0) for key in ("done", "failed", "total"))
        if done + failed < total:
            ended, asked = ended + done + failed, asked + total
    return (ended, asked) if asked else None


def _bar(done: int, total: int, width: int) -> Text:
    full = round(width * min(1.0, done / total)) if total > 0 else 0
    return Text.assemble(("█" * full, "cyan"), ("░" * (width - full), "dim"))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _remaining(progress: TrialProgress) -> str:
    """Estimate the time left in this phase from the last steps."""
    records = progress.train or progress.warmup
    pace = mean(_recent(records), *(("seconds", "total") if progress.train else ("seconds",)))
    done, total = progress.step
    return "" if pace is None or done >= total else _clock(pace * (total - done))


def _recent(records: Sequence[Record]) -> list[Record]:
    return list(itertools.islice(reversed(records), _RECENT_STEPS))


def _notes(frame: Frame, width: int, room: int) -> list[Text]:
    """Return the newest notes in their order; each is wrapped, because its end has the cause."""
    shown: list[Text] = []
    for note in reversed(frame.notes):
        wrapped = _wrapped(Text(note, "yellow"), width, _NOTE_LINES)
        if shown and len(shown) + len(wrapped) > room:
            break
        shown = wrapped + shown
    return shown


def _wrapped(text: Text, width: int, most: int) -> list[Text]:
    wrapped = text.wrap(Console(width=width), width, overflow="fold")
    kept = list(wrapped[:most])
    if len(wrapped) > most:
        kept[-1] = Text(kept[-1].plain.rstrip()[: width - 1] + "…", kept[-1].style)
    return kept


def _side_by_side(left: Sequence[Text], right: Sequence[Text], width: int) -> list[Text]:
    """Set two columns. The left one is as wide as its text, and at least half of the screen."""
    half = max(width // 2, min(width - 34, max((cell_len(text.plain) for text in left), default=0)))
    pairs = []
    for first, second in itertools.zip_longest(left, right, fillvalue=Text()):
        line = first.copy()
        line.truncate(half - _GAP, overflow="ellipsis", pad=True)
        pairs.append(_cut(line.append(" " * _GAP).append_text(second), width))
    return pairs


def _fields(title: str, rows: Sequence[Row]) -> list[Text]:
    named = [Text.assemble((f"{name:<{_LABEL}} ", "dim"), value) for name, value in rows]
    return [Text(title, "bold cyan"), *named]


def _training(progress: TrialProgress) -> list[Text]:
    if not progress.train:
        if not progress.warmup:
            return _evaluated(progress)
        last: Record = progress.warmup[-1]
        pace = fmt(rate(last, "tokens", "seconds"), ",.0f")
        loss = f"{fmt(number(last, 'loss'), '.3f')} {curve_text(progress.warmup, 'loss')}"
        return [*_fields("warm-up", [("loss", loss), ("speed", f"{pace} tokens/s")]), *_evaluated(progress)]
    last = progress.train[-1]
    rows: list[Row]
    stats = [("gradient", "grad_norm", ".3f"), ("entropy", "entropy_mean", ".3f")]
    if "reward_mean" not in last:  # rows of data.demos
        rows = [
            ("loss", f"{fmt(number(last, 'stats', 'loss'), '.3f')} {curve_text(progress.train, 'stats', 'loss')}"),
            ("accuracy", f"{fmt(number(last, 'accuracy'), '.1%')} {curve_text(progress.train, 'accuracy')}"),
            ("length", f"{fmt(number(last, 'length_mean'), '.0f')} tokens"),
            *((label, fmt(number(last, "stats", name), spec)) for label, name, spec in stats[:1]),
        ]
        return [*_fields("training, last step", rows), *_evaluated(progress)]
    reward = f"{fmt(number(last, 'reward_mean'), '+.3f')} {curve_text(progress.train, 'reward_mean')}"
    same = all(number(record, "reward_mean") == number(record, "accuracy") for record in progress.train)
    mean_length, cut = number(last, "length_mean"), number(last, "truncated_fraction")
    rows = [
        *([] if same else [("reward", reward)]),  # a reward of 0 and 1 is the accuracy
        ("accuracy", f"{fmt(number(last, 'accuracy'), '.1%')} {curve_text(progress.train, 'accuracy')}"),
        ("length", f"{fmt(mean_length, '.0f')} tokens, {fmt(cut, '.0%')} cut off"),
        ("signal", f"{fmt(_with_signal(last), '.0%')} of the groups"),
        *((label, fmt(number(last, "stats", name), spec)) for label, name, spec in stats),
    ]
    for label, name in _OF_OTHER_MODELS:
        if (value := number(last, "stats", name)) is not None:
            rows.append((label, fmt(value, ".3f")))
    return [*_fields("training, last step", rows), *_evaluated(progress)]


def _evaluated(progress: TrialProgress) -> list[Text]:
    """Return the first and the newest evaluation."""
    evals = list(progress.evals.items())
    return [
        Text.assemble((f"{name:<{_LABEL}} ", "dim"), headline(record, briefly=True))
        for name, record in [*evals[:1], *evals[1:][-1:]]
    ]


def _with_signal(record: Record) -> float | None:
    equal = number(record, "signal", "equal")
    return None if equal is None else 1.0 - equal


def _asynchrony(progress: TrialProgress, max_staleness: int) -> list[Text]:
    status = progress.status
    last: Record = progress.train[-1] if progress.train else {}
    recent = _recent(progress.train)
    stale = f"{fmt(number(last, 'staleness', 'mean'), '.1f')} mean, {fmt(number(last, 'staleness', 'max'), '.0f')} max"
    known = [v for v in (number(status, "version"), number(last, "version")) if v is not None and v >= 0]
    rows: list[Row] = [
        ("version", fmt(max(known, default=None), ".0f")),
        ("staleness", f"{stale if last else '-'} (bound {max_staleness})"),
        *(("untrained" if not i else "", text) for i, text in enumerate(_untrained(last))),
    ]
    if failures := failures_text(last.get("verdict_failures")):
        rows.append(("verdicts", Text(failures, style="bold red")))
    rows += _groups(status, last)
    if isinstance(prompts := status.get("prompts"), Mapping) and prompts:
        shares = [f"{name} {percent(share, 0)}" for name in prompts if (share := number(prompts, name) or 0.0) >= 0.005]
        rows += [("prompts", ", ".join(shares[:2])), ("", ", ".join(shares[2:]))][: 1 + (len(shares) > 2)]
    rows.append(("sampled", f"{fmt(number(status, 'throughput', 'generated_tokens_per_s'), ',.0f')} tokens/s"))
    if recent:
        rows.append(("trained", f"{fmt(mean(recent, 'consumed_tokens_per_s'), ',.0f')} tokens/s"))
    if memory := memory_briefly(status):
        rows.append(("memory", memory))
    admission = status.get("admission")
    if isinstance(admission, Mapping):
        reason = str(admission.get("reason"))
        headroom = f"{fmt(number(admission, 'headroom'), ',.0f')} groups free"
        rows.append(("admission", headroom if admission.get("admits") else _CLOSED.get(reason, reason)))
    return _fields("asynchrony", rows)


def _groups(status: Record, last: Record) -> list[Row]:
    ledger = status.get("ledger")
    if not isinstance(ledger, Mapping):
        return []
    open_, ended = (
        ", ".join(f"{fmt(number(ledger, state), ',.0f')} {state}" for state in states if state in ledger)
        for states in (("running", "finished"), ("trained", "dropped"))
    )
    rows: list[Row] = [("groups", open_), ("", ended)]
    if filtered := number(last, "dropped_filtered"):
        rows.append(("", f"{filtered:,.0f} filtered in the last step"))
    return rows


def _untrained(last: Record) -> list[str | Text]:
    """Return the shares of sampled tokens that were not trained, by reason; red if staleness takes too many."""
    if "untrained" not in last:
        return ["-"]
    shares = sorted(untrained_shares(last).items(), key=lambda item: -item[1])
    too_old = (number(last, "too_old") or 0.0) > WARN_SHARE
    return [
        Text(f"{percent(share)} {reason}", "bold red" if too_old and reason in ("stale", "masked") else "")
        for reason, share in shares[:3]
    ] or ["0%"]


def _rows(entries: object) -> list[Record]:
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, Sequence) else []


def _servers(status: Record, width: int) -> list[Text]:
    """Return a line for all servers, then one for each, those in trouble first; [] while none is registered."""
    servers = sorted(_rows(status.get("servers")), key=_calmness)
    if not servers:
        return []
    states = Counter(str(server.get("state", "-")) for server in servers)
    speed = sum(number(server, "tokens_per_s") or 0.0 for server in servers)
    versions = Counter(version for server in servers if (version := number(server, "version")) is not None)
    newest = f"; {versions[max(versions)]} at version {max(versions):.0f}" if versions else ""
    counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
    head = Text.assemble(("servers    ", "dim"), f"{len(servers)}: {counts}{newest}; {speed:,.0f} tokens/s")
    name_width = max(len(_name(server)) for server in servers)
    return [_cut(head, width), *(_cut(_server(server, name_width), width) for server in servers)]


def _calmness(server: Record) -> tuple[int, float]:
    state = str(server.get("state", ""))
    order = (*_TROUBLE, None, *_CALM)
    place = order.index(state) if state in order else len(_TROUBLE)
    version = number(server, "version")
    return place, -1.0 if version is None else version


def _name(server: Record) -> str:
    return str(server.get("name", "?")).replace("generation_server/", "server/")


def _server(server: Record, name_width: int) -> Text:
    """Return the line of a server: its load and address, or the error of one that is in trouble."""
    state, since = str(server.get("state", "-")), number(server, "updating_s")
    style = "bold red" if state in _TROUBLE else "yellow" if state not in ("ready", "serving") else ""
    shown = state if since is None or state != "updating" else f"updating {since:.0f} s"
    version = f" v{fmt(number(server, 'version'), '.0f'):<4} "
    text = Text.assemble(f"  {_name(server):<{name_width}} ", (f"{shown:<13}", style), version)
    if (error := server.get("error")) and state not in ("ready", "serving"):
        return text.append(str(error))
    running, rate_ = number(server, "running"), number(server, "tokens_per_s")
    address = str(server.get("url", "")).removeprefix("http://")
    return text.append(f"{fmt(running, '.0f'):>3} running {fmt(rate_, ',.0f'):>7} tokens/s  {address}")
