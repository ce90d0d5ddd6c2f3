"""Shows a running trial: a live display on a terminal, one line per step otherwise."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from realsys.buffer.token_losses import WARN_SHARE
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.evaluation.eval_records import headline
from realsys.launch.screen.progress import TIME_PARTS, Progress, Record, mean, number

T = TypeVar("T")

_RECENT_STEPS = 8
_RECENT_NOTES = 4
#: shown when the algorithm has a critic or a reference
_OF_OTHER_MODELS = (
    ("explained variance", "critic_train/explained_variance"),
    ("KL to reference", "kl_ref_mean"),
    ("KL to reference", "advantages/kl_ref_mean"),
)
#: reason why the manager grants nothing, in words
_CLOSED = {
    "staleness": "waits for the trainer (eta)",
    "exhausted": "all groups of this run granted",
    "no_server": "waits for a server with weights",
    "paused": "paused",
}


class View(Protocol):
    """Display of the progress of a run. A context manager: it owns the terminal while it is open."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def note(self, text: str) -> None: ...
    def refresh(self, progress: Progress, new: Iterable[Record] = ()) -> None:
        """Show ``progress``; ``new`` are its records that were not shown yet."""
        ...


def make_view(console: Console, config: Config, paths: TrialPaths, *, plain: bool) -> View:
    """Make a live view on a terminal, and a plain one for a file, a pipe or on request."""
    if plain or not console.is_terminal:
        return PlainView(console)
    return LiveView(console, config, paths)


# ---- plain


class PlainView:
    """View that prints one line per record."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._address: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def note(self, text: str) -> None:
        self._print(f"! {text}")

    def refresh(self, progress: Progress, new: Iterable[Record] = ()) -> None:
        if progress.address and progress.address != self._address:
            self._address = progress.address
            self._print(f"status page: {self._address}/")
        for record in new:
            if line := _line(record):
                self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _line(record: Record) -> str:
    """Return the line for a record; empty if it is not shown."""
    match record.get("kind"):
        case "phase":
            return f"phase {record.get('phase', '?')}"
        case "warmup":
            step, total = int(number(record, "step") or 0), int(number(record, "total") or 0)
            return warmup_line(record) if step % 20 == 0 or step in (1, total) else ""
        case "train":
            return train_line(record)
        case "eval":
            return eval_line(record)
        case "recovered":
            return recovered_line(record)
    return ""


def recovered_line(record: Record) -> str:
    step = number(record, "step")
    where = "from the beginning" if step is None or step < 0 else f"after step {step:.0f}"
    return f"training continues {where}"


def warmup_line(record: Record) -> str:
    return (
        f"warm-up {_count(record)}  loss {fmt(number(record, 'loss'), '.3f')}  "
        f"{fmt(_rate(record, 'tokens', 'seconds'), ',.0f')} tok/s"
    )


def train_line(record: Record) -> str:
    return (
        f"step {_count(record)}  v{fmt(number(record, 'version'), '.0f')}  "
        f"reward {fmt(number(record, 'reward_mean'), '+.3f')}  accuracy {fmt(number(record, 'accuracy'), '.1%')}  "
        f"length {fmt(number(record, 'length_mean'), '.0f')}  "
        f"lag {fmt(number(record, 'staleness', 'mean'), '.1f')}/{fmt(number(record, 'staleness', 'max'), '.0f')}  "
        f"{fmt(number(record, 'consumed_tokens_per_s'), ',.0f')} tok/s  "
        f"{fmt(number(record, 'seconds', 'total'), '.1f')} s (waited {fmt(number(record, 'seconds', 'wait'), '.1f')})"
        + "".join(f"  {name} {share:.0%}" for name, share in _shares(record) if share >= 0.005)
        + (f"  verdict failures {failures}" if (failures := failures_text(record.get("verdict_failures"))) else "")
    )


def failures_text(failures: object) -> str:
    """Return the completions whose verifier failed or exceeded a limit, by cause; "" if there are none."""
    counts = failures if isinstance(failures, Mapping) else {}
    return ", ".join(f"{number(counts, cause) or 0:,.0f} {cause}" for cause in sorted(counts))


def _shares(record: Record) -> Iterator[tuple[str, float]]:
    """Yield the shares of a step that a reader should notice: what gives no gradient, is cut off, or is not trained."""
    yield "no signal", number(record, "signal", "equal") or 0.0
    yield "cut off", number(record, "truncated_fraction") or 0.0
    for reason, share in sorted(_untrained_shares(record).items()):
        if reason != "zero_advantage":  # the groups without signal
            yield reason, share


def _untrained_shares(record: Record) -> Mapping[str, float]:
    shares = record.get("untrained")
    return shares if isinstance(shares, Mapping) else {}


def eval_line(record: Record) -> str:
    line = f"evaluation {record.get('eval_id', '?')}: {headline(record)}"
    if number(record, "accuracy") is not None:
        line += f", reward {fmt(number(record, 'reward_mean'), '+.3f')}"
    return line + "".join(
        f", {name} {fmt(value, '.3f')}" for name, value in sorted((record.get("metrics") or {}).items())
    )


def _count(record: Record) -> str:
    step, total = fmt(number(record, "step"), ".0f"), fmt(number(record, "total"), ".0f")
    return f"{step:>{len(total)}}/{total}"


def _rate(record: Record, amount: str, seconds: str) -> float | None:
    top, bottom = number(record, amount), number(record, seconds)
    return top / bottom if top is not None and bottom else None


def fmt(value: float | None, spec: str) -> str:
    """Format a number; None becomes a dash."""
    return "-" if value is None else format(value, spec)


# ---- live


class LiveView:
    """View that redraws a panel once a second."""

    def __init__(self, console: Console, config: Config, paths: TrialPaths) -> None:
        self._config, self._paths = config, paths
        self._started = time.monotonic()
        self._progress = Progress()
        self._notes: deque[str] = deque(maxlen=_RECENT_NOTES)
        self._live = Live(console=console, auto_refresh=False, get_renderable=self.render, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.refresh()
        self._live.stop()

    def note(self, text: str) -> None:
        self._notes.append(f"{time.strftime('%H:%M:%S')} {text}")
        self._live.refresh()

    def refresh(self, progress: Progress, new: Iterable[Record] = ()) -> None:
        self._progress = progress
        self._live.refresh()

    def render(self) -> RenderableType:
        progress = self._progress
        parts: list[RenderableType] = [self._headline(progress)]
        body = Table.grid(padding=(0, 4))
        body.add_row(_training(progress), _asynchrony(progress, self._config))
        parts += [Text(), body]
        if progress.train:
            parts += [Text(), Text.assemble(("step time  ", "dim"), time_split(_recent(progress.train)))]
        servers = _servers(progress.status)
        if servers is not None:
            parts += [Text(), servers]
        parts += [Text(note, style="yellow", overflow="ellipsis", no_wrap=True) for note in self._notes]
        title = f"realsys  {self._config.experiment}/{self._config.trial}"
        footer = f"{progress.address}/" if progress.address else str(self._paths.root)
        return Panel(Group(*parts), title=title, subtitle=footer, border_style="cyan", padding=(1, 2))

    def _headline(self, progress: Progress) -> RenderableType:
        done, total = progress.step
        grid = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(total, 1), completed=done, width=40)
        elapsed = time.strftime("%H:%M:%S", time.gmtime(time.monotonic() - self._started))
        label = f"{done}/{total}" if total else ""
        grid.add_row(Text(progress.phase, style="bold"), bar, label, elapsed, _remaining(progress))
        return grid


def _remaining(progress: Progress) -> str:
    """Estimate the time left in this phase from the last steps."""
    records = progress.train or progress.warmup
    path = ("seconds", "total") if progress.train else ("seconds",)
    pace = mean(_recent(records), *path)
    done, total = progress.step
    if pace is None or done >= total:
        return ""
    return f"{time.strftime('%H:%M:%S', time.gmtime(pace * (total - done)))} left"


def _recent(records: Sequence[Record]) -> list[Record]:
    return list(itertools.islice(reversed(records), _RECENT_STEPS))


def _fields(title: str, rows: Sequence[tuple[str, str | Text]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row(Text(title, style="bold cyan"), "")
    for name, value in rows:
        table.add_row(Text(name, style="dim"), value)
    return table


def _training(progress: Progress) -> Table:
    if not progress.train:
        last: Record = progress.warmup[-1] if progress.warmup else {}
        rate = _rate(last, "tokens", "seconds")
        return _fields("warm-up", [("loss", fmt(number(last, "loss"), ".3f")), ("tokens/s", fmt(rate, ",.0f"))])
    last = progress.train[-1]
    recent = _recent(progress.train)
    rows = [
        ("reward", f"{fmt(number(last, 'reward_mean'), '+.3f')}  {sparkline(progress.train, 'reward_mean')}"),
        ("accuracy", f"{fmt(number(last, 'accuracy'), '.1%')}  {sparkline(progress.train, 'accuracy')}"),
        (
            "answer length",
            f"{fmt(number(last, 'length_mean'), '.0f')}, {fmt(number(last, 'truncated_fraction'), '.0%')} cut off",
        ),
        ("groups with signal", fmt(_with_signal(last), ".0%")),
        ("tokens/s trained", fmt(mean(recent, "train_tokens_per_s"), ",.0f")),
        ("tokens/s end to end", fmt(mean(recent, "consumed_tokens_per_s"), ",.0f")),
        ("gradient norm", fmt(number(last, "stats", "grad_norm"), ".3f")),
    ]
    for label, path in _OF_OTHER_MODELS:
        if (value := number(last, "stats", path)) is not None:
            rows.append((label, fmt(value, ".3f")))
    for name, record in progress.evals.items():
        rows.append((f"held out, {name}", headline(record)))
    return _fields("training", rows)


def _with_signal(record: Record) -> float | None:
    equal = number(record, "signal", "equal")
    return None if equal is None else 1.0 - equal


def _asynchrony(progress: Progress, config: Config) -> Table:
    status = progress.status
    last: Record = progress.train[-1] if progress.train else {}
    lag = f"{fmt(number(last, 'staleness', 'mean'), '.1f')} mean, {fmt(number(last, 'staleness', 'max'), '.0f')} max"
    rows: list[tuple[str, str | Text]] = [
        ("version", fmt(_published(status, last), ".0f")),
        ("staleness", f"{lag if last else '-'}  (eta {config.asynchronous.max_head_offpolicyness})"),
        ("dropped stale", fmt(number(last, "dropped_stale"), ".0f")),
        ("not trained", _untrained(last)),
    ]
    if failures := failures_text(last.get("verdict_failures")):
        rows.append(("verdict failures", Text(failures, style="bold red")))
    if filtered := number(last, "dropped_filtered"):
        rows.append(("dropped by filter", fmt(filtered, ".0f")))
    ledger = status.get("ledger")
    if isinstance(ledger, Mapping):
        counts = [(state, number(ledger, state)) for state in ("running", "finished", "trained", "dropped")]
        rows += [(f"groups {state}", fmt(count, ",.0f")) for state, count in counts if count is not None]
    if isinstance(prompts := status.get("prompts"), Mapping):
        rows.append(("prompts", ", ".join(f"{name} {share:.0%}" for name, share in prompts.items())))
    rows.append(("tokens/s generated", fmt(number(status, "throughput", "generated_tokens_per_s"), ",.0f")))
    admission = status.get("admission")
    if isinstance(admission, Mapping):
        reason = str(admission.get("reason"))
        headroom = f"{fmt(number(admission, 'headroom'), ',.0f')} groups free"
        rows.append(("admission", headroom if admission.get("admits") else _CLOSED.get(reason, reason)))
    return _fields("asynchrony", rows)


def _untrained(last: Record) -> Text | str:
    """Return the shares of sampled tokens that were not trained, by reason; red if staleness takes too many."""
    if "untrained" not in last:
        return "-"
    text = ", ".join(f"{reason} {share:.1%}" for reason, share in sorted(_untrained_shares(last).items())) or "0 %"
    too_old = number(last, "too_old") or 0.0
    return Text(f"{text} of tokens", style="bold red") if too_old > WARN_SHARE else f"{text} of tokens"


def _published(status: Record, last: Record) -> float | None:
    """Return the newest version in the status or the step log; None before the first."""
    known = [v for v in (number(status, "version"), number(last, "version")) if v is not None and v >= 0]
    return max(known, default=None)


def _servers(status: Record) -> Table | None:
    """Make the table of servers; None while no server is registered."""
    entries = status.get("servers")
    if not isinstance(entries, Sequence) or not entries:
        return None
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold cyan")
    for column in ("server", "state", "version", "running", "tokens/s", "address"):
        table.add_column(column, justify="right" if column in ("version", "running", "tokens/s") else "left")
    for entry in entries:
        if isinstance(entry, Mapping):
            table.add_row(
                str(entry.get("name", "?")),
                str(entry.get("state", "-")),
                fmt(number(entry, "version"), ".0f"),
                fmt(number(entry, "running"), ".0f"),
                fmt(number(entry, "tokens_per_s"), ",.0f"),
                str(entry.get("url", "-")),
            )
    return table


def time_split(records: Sequence[Record]) -> str:
    """Return the mean time of a step and the shares of its parts: `0.52 s: wait 10%, train 80%, ...`."""
    total = mean(records, "seconds", "total")
    if not total:
        return "-"
    parts = [(part, mean(records, "seconds", part)) for part in TIME_PARTS]
    shares = ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in parts if seconds is not None)
    return f"{total:.2f} s: {shares}" if shares else f"{total:.2f} s"


def sparkline(records: Sequence[Record], field: str, width: int = 24) -> str:
    """Draw the course of a field over ``records`` with block characters."""
    values = [v for v in (number(r, field) for r in records) if v is not None]
    if len(values) < 2:
        return ""
    if len(values) > width:  # mean of equal stretches
        bounds = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(values), max(values)
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(blocks[round((v - low) / (high - low) * 7) if high > low else 0] for v in values)
