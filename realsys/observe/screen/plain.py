"""Lines of a run for a file, a pipe or a log: one per step, evaluation, phase and note."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Self

from rich.console import Console

from realsys.observe.evaluation_records import headline
from realsys.observe.percent import percent
from realsys.observe.screen.progress import Record, TrialProgress, number
from realsys.observe.screen.text_figures import failures_text, fmt, rate, untrained_shares, worth_showing


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

    def refresh(self, progress: TrialProgress, new: Iterable[Record] = ()) -> None:
        if progress.address and progress.address != self._address:
            self._address = progress.address
            self._print(f"status page: {progress.page}")
        for record in new:
            if line := _line(record):
                self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)


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
            last = number(record, "step")
            where = "from the beginning" if last is None or last < 0 else f"after step {last:.0f}"
            return f"training continues {where}"
    return ""


def warmup_line(record: Record) -> str:
    return (
        f"warm-up {_count(record)}  loss {fmt(number(record, 'loss'), '.3f')}  "
        f"{fmt(rate(record, 'tokens', 'seconds'), ',.0f')} tok/s"
    )


def train_line(record: Record) -> str:
    begin = f"step {_count(record)}  v{fmt(number(record, 'version'), '.0f')}  "
    if "reward_mean" not in record:  # rows of data.demos
        return (
            f"{begin}loss {fmt(number(record, 'stats', 'loss'), '.3f')}  "
            f"accuracy {fmt(number(record, 'accuracy'), '.1%')}  length {fmt(number(record, 'length_mean'), '.0f')}  "
            f"{fmt(number(record, 'consumed_tokens_per_s'), ',.0f')} tok/s  "
            f"{fmt(number(record, 'seconds', 'total'), '.1f')} s"
        )
    return (
        f"{begin}reward {fmt(number(record, 'reward_mean'), '+.3f')}  "
        f"accuracy {fmt(number(record, 'accuracy'), '.1%')}  "
        f"length {fmt(number(record, 'length_mean'), '.0f')}  "
        f"staleness {fmt(number(record, 'staleness', 'mean'), '.1f')}/"
        f"{fmt(number(record, 'staleness', 'max'), '.0f')}  "
        f"{fmt(number(record, 'consumed_tokens_per_s'), ',.0f')} tok/s  "
        f"{fmt(number(record, 'seconds', 'total'), '.1f')} s (waited {fmt(number(record, 'seconds', 'wait'), '.1f')})"
        + "".join(f"  {name} {percent(share, 0)}" for name, share in _shares(record) if share >= 0.005)
        + (f"  verdict failures {failures}" if (failures := failures_text(record.get("verdict_failures"))) else "")
    )


def _shares(record: Record) -> Iterator[tuple[str, float]]:
    """Yield the shares of a step that a reader should notice: what gives no gradient, is cut off, or is not trained."""
    yield "no signal", number(record, "signal", "equal") or 0.0
    yield "cut off", number(record, "truncated_fraction") or 0.0
    for reason, share in sorted(untrained_shares(record).items()):
        if reason != "zero_advantage":  # the groups without signal
            yield reason, share


def eval_line(record: Record) -> str:
    line = f"evaluation {record.get('eval_id', '?')}: {headline(record)}"
    if number(record, "accuracy") is not None and "loss" not in record:
        line += f", reward {fmt(number(record, 'reward_mean'), '+.3f')}"
    metrics = record.get("metrics") or {}
    return line + "".join(f", {name} {fmt(metrics[name], '.3f')}" for name in worth_showing(metrics))


def _count(record: Record) -> str:
    step, total = fmt(number(record, "step"), ".0f"), fmt(number(record, "total"), ".0f")
    return f"{step:>{len(total)}}/{total}"


class ServiceView(PlainView):
    """View of a run for clients: where they connect, and every few seconds what they do."""

    _url = ""
    _shown_at = 0.0
    _shown: tuple[str, ...] = ()

    def refresh(self, progress: TrialProgress, new: Iterable[Record] = ()) -> None:
        super().refresh(progress, new)
        for line in address_lines(progress) if served_at(progress) != self._url else ():
            self._print(line)
        self._url = served_at(progress)
        shown = tuple(model_line(model) for model in models_of(progress))
        if shown != self._shown and time.monotonic() >= self._shown_at + _EVERY_S:
            for line in shown:
                if line not in self._shown:
                    self._print(line)
            self._shown_at, self._shown = time.monotonic(), shown


def served_at(progress: TrialProgress) -> str:
    """Return the address for clients; "" before there is one."""
    return str(_service(progress).get("url") or "")


def models_of(progress: TrialProgress) -> list[Record]:
    """Return the models of clients."""
    models = _service(progress).get("models")
    return [each for each in models if isinstance(each, Mapping)] if isinstance(models, list) else []


def _service(progress: TrialProgress) -> Record:
    master = progress.status.get("master")
    serve = master.get("serve") if isinstance(master, Mapping) else None
    return serve if isinstance(serve, Mapping) else {}


def address_lines(progress: TrialProgress) -> list[str]:
    """Return how a client in Python connects; [] before it can."""
    if not (url := served_at(progress)):
        return []
    return [
        f"clients: base_url={url}, api_key as in serve.json of the trial",
        "  import tinker",
        f"  tinker.ServiceClient(base_url={url!r}, api_key='tml-...').get_server_capabilities()",
    ]


def model_line(model: Record) -> str:
    """Return one line about a model of a client."""
    counts = (f"{fmt(number(model, key), ',.0f')} {key}" for key in ("steps", "calls", "tokens", "waiting"))
    error = f"  last error: {model['last_error']}" if model.get("last_error") else ""
    return f"{model.get('owner', '?')}  {model.get('model', '?')}  {'  '.join(counts)}{error}"


# ---- lines about an evaluation that runs: which part of its completions is there


_EVERY_S = 5.0


class EvaluationView(PlainView):
    """View that prints phases, results, and every few seconds the progress of each evaluation."""

    _shown_at = 0.0
    _shown = ""

    def refresh(self, progress: TrialProgress, new: Iterable[Record] = ()) -> None:
        super().refresh(progress, new)
        if time.monotonic() < self._shown_at + _EVERY_S:
            return
        line = progress_line(progress.status.get("evaluations"))
        if line and line != self._shown:
            self._shown_at, self._shown = time.monotonic(), line
            self._print(line)


def progress_line(evaluations: object) -> str:
    """Return the progress of the unfinished evaluations of a manager's status; "" without any."""
    if not isinstance(evaluations, Mapping):
        return ""
    parts = []
    for name, state in evaluations.items():
        done, failed, total = (int(number(state, key) or 0) for key in ("done", "failed", "total"))
        if done + failed < total:
            parts.append(f"{name} {done + failed}/{total}" + (f" ({failed} failed)" if failed else ""))
    return ", ".join(parts)
