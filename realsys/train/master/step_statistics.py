"""Statistics of a train batch for the step log, from metadata and from the statistics of the calls."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from realsys.algorithm.token_losses import StepLosses
from realsys.cluster.lease import CheckAlive, unleased
from realsys.cluster.process import resident_bytes
from realsys.cluster.worker import WorkerContext
from realsys.errors import RealsysError
from realsys.manager.ledger.tickets import ticket_ranges
from realsys.model_calls import SnapshotPlan
from realsys.train.master.executor import CallResult, step_gpu_use
from realsys.train.master.publish import set_key
from realsys.types import CONSTRAINED, SampleMeta


@dataclass(frozen=True, slots=True)
class EpisodeMeta:
    """Metadata of one episode, collected from its rows."""

    reward: float
    correct: bool | None
    truncated: bool
    tokens: int  # loss tokens of all its rows
    metrics: Mapping[str, float]


class Increase:
    """Increase of counts of the manager since the last look. They start at 0 with each manager.

    ``known`` False: the counts before the first look are not known, and have no increase.
    """

    def __init__(self, *, known: bool = True) -> None:
        self._last: Counter[Any] | None = Counter() if known else None

    def of(self, counts: Mapping[Any, int]) -> Counter[Any]:
        """Return the increase of each count that has grown, by name."""
        last, self._last = self._last, Counter(counts)
        if last is None:
            return Counter()
        if any(counts.get(name, 0) < count for name, count in last.items()):
            last = Counter()
        return Counter({name: counts[name] - last[name] for name in sorted(counts) if counts[name] > last[name]})


def episodes_of(samples: Sequence[SampleMeta]) -> list[EpisodeMeta]:
    """Return the episodes of a batch, each once, in the order of their first rows."""
    first: dict[tuple[str, int], SampleMeta] = {}
    for sample in samples:
        first.setdefault((sample.ticket_id, sample.episode), sample)
    return [
        EpisodeMeta(s.reward, s.correct, s.truncated, s.episode_tokens or s.loss_tokens, s.metrics)
        for s in first.values()
    ]


def batch_statistics(samples: Sequence[SampleMeta], *, version: int) -> dict[str, Any]:
    """Return the statistics of a train batch, from metadata alone. ``version``: the weights that
    train on it.

    Rewards, lengths and ``metrics`` are means over episodes. ``accuracy`` is over the episodes
    whose correctness is known, and None if there is none. The staleness of a row is ``version``
    minus the version of its oldest token; ``min`` alone is taken over the newest tokens.
    """
    episodes = episodes_of(samples)
    judged = [e for e in episodes if e.correct is not None]
    staleness = [version - s.version_min for s in samples]
    histogram = Counter(staleness)
    groups: dict[str, list[SampleMeta]] = {}
    for sample in samples:
        groups.setdefault(sample.ticket_id, []).append(sample)
    outcomes = [{sample.correct for sample in group} for group in groups.values()]
    return {
        "groups": len({s.ticket_id for s in samples}),
        "episodes": len(episodes),
        "sequences": len(samples),
        "tokens": sum(s.length for s in samples),
        "answer_tokens": sum(s.loss_tokens for s in samples),
        "reward_mean": _mean([e.reward for e in episodes]),
        "reward_std": _deviation([e.reward for e in episodes]),
        "accuracy": _mean([float(bool(e.correct)) for e in judged]),
        "length_mean": _mean([e.tokens for e in episodes]),
        "length_max": max(e.tokens for e in episodes),
        "length_correct": _mean([e.tokens for e in judged if e.correct]),
        "length_wrong": _mean([e.tokens for e in judged if not e.correct]),
        "signal": {
            "wrong": sum(outcome == {False} for outcome in outcomes) / len(groups),
            "right": sum(outcome == {True} for outcome in outcomes) / len(groups),
            "equal": sum(len({sample.reward for sample in group}) == 1 for group in groups.values()) / len(groups),
            "batch_equal": float(len({sample.reward for sample in samples}) == 1),  # 1: all rewards are equal
        },
        "truncated_fraction": _mean([float(e.truncated) for e in episodes]),
        # rows whose sampling began with one version of the weights and ended with a later one
        "interrupted_fraction": sum(s.version_min < s.version_max for s in samples) / len(samples),
        # tokens that attended to keys of older weights; no engine keeps any with kv_on_update=recompute
        "kept_keys_fraction": sum(s.kept_tokens for s in samples) / max(1, sum(s.loss_tokens for s in samples)),
        "metrics": mean_metrics(e.metrics for e in episodes),
        "staleness": {
            "min": min(version - s.version_max for s in samples),
            "mean": _mean(staleness),
            "max": max(staleness),
            "histogram": {str(value): histogram[value] for value in sorted(histogram)},
        },
    }


def row_statistics(samples: Sequence[SampleMeta]) -> dict[str, Any]:
    """Return the statistics of a batch of rows of ``data.demos``."""
    return {
        "groups": len({s.ticket_id for s in samples}),
        "sequences": len(samples),
        "tokens": sum(s.length for s in samples),
        "answer_tokens": sum(s.loss_tokens for s in samples),
        "length_mean": _mean([s.loss_tokens for s in samples]),
        "length_max": max(s.loss_tokens for s in samples),
    }


def untrained_shares(
    losses: StepLosses, samples: Sequence[SampleMeta], stats: Mapping[str, float], *, masks_truncated: bool
) -> dict[str, float]:
    """Return reason -> share of the step's sampled tokens that were not trained.

    ``losses`` has the tokens that are in no batch. ``stats`` of the call `actor_train` say which tokens of
    the batch reached the loss: not those of truncated episodes (``masks_truncated``), of rows whose
    advantage is 0 and that were skipped for it (``zero_advantage``), and of minibatches that were left out
    (``skipped_step``). Without that call no token of the batch is counted as untrained.
    """
    shares = dict(losses.untrained)
    if "answer_tokens" not in stats:
        return shares
    # Without a computed row the call reports no `tokens`.
    taken, computed = round(stats["answer_tokens"]), round(stats.get("tokens", 0.0))
    truncated = sum(s.loss_tokens for s in samples if s.truncated) if masks_truncated else 0
    truncated = min(truncated, taken - computed)
    in_batch = {
        "truncated": truncated,
        "zero_advantage": taken - computed - truncated,
        "skipped_step": sum(s.loss_tokens for s in samples) - taken,
    }
    return shares | {reason: n / losses.tokens for reason, n in in_batch.items() if n > 0}


def mean_metrics(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return for each name its mean over the episodes that have it."""
    values: dict[str, list[float]] = {}
    for episode in metrics:
        for name, value in episode.items():
            values.setdefault(name, []).append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in sorted(values.items())}


def call_seconds(results: Mapping[str, CallResult], training: Collection[str]) -> dict[str, float]:
    """Split the seconds of a graph: ``train`` while a call of ``training`` runs, ``inf`` for the
    rest.

    Calls overlap, so this is not a sum over calls. The two add up to the time from the first
    request to the last reply.
    """
    intervals = sorted((result.began, result.ended) for name, result in results.items() if name in training)
    trained, covered = 0.0, float("-inf")
    for began, ended in intervals:
        trained += max(0.0, ended - max(began, covered))
        covered = max(covered, ended)
    elapsed = max(r.ended for r in results.values()) - min(r.began for r in results.values())
    return {"inf": elapsed - trained, "train": trained}


def train_record(
    statistics: Mapping[str, Any],
    seconds: Mapping[str, float],
    results: Mapping[str, CallResult],
    main: str = "actor_train",
) -> dict[str, Any]:
    """Return the fields of a train step's record that describe its batch, its time and its calls.

    ``seconds``: of the parts of the step, and ``total``. ``call_seconds``: of the slowest rank of
    each call, without its wait for other calls. Statistics of calls other than ``main`` get
    the name of the call as prefix, shortened for the actor's: ``inf/tokens``,
    ``critic_train/loss``. Statistics that already have a prefix for their group keep it:
    ``agreement/ratio``.
    """
    stats: dict[str, float] = {}
    for name, result in results.items():
        prefix = "" if name == main else f"{name.removeprefix('actor_')}/"
        stats |= {key if key.startswith(AGREEMENT) else f"{prefix}{key}": value for key, value in result.stats.items()}
    return {
        "seconds": dict(seconds),
        "call_seconds": {name: result.seconds for name, result in results.items()},
        "transferred_bytes": sum(result.received for result in results.values()),
        "train_tokens_per_s": statistics["tokens"] / max(1e-9, seconds["inf"] + seconds["train"]),
        "consumed_tokens_per_s": statistics["answer_tokens"] / max(1e-9, seconds["total"]),
        "stats": stats,
        **({"gpu": gpu} if (gpu := step_gpu_use({name: result.gpu for name, result in results.items()})) else {}),
        **statistics,
        "memory": {**_host_memory(results), **statistics.get("memory", {})},
    }


def _host_memory(results: Mapping[str, CallResult]) -> dict[str, int]:
    """Return the resident memory of the training ranks, each at its largest, and of this process, in bytes."""
    ranks: dict[int, int] = {}
    for result in results.values():
        for worker, size in result.host_bytes.items():
            ranks[worker] = max(size, ranks.get(worker, 0))
    sizes = {"rank_bytes": max(ranks.values(), default=0), "ranks_bytes": sum(ranks.values())}
    return sizes | {"master_bytes": resident_bytes()}


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None without values: an absent number is not zero."""
    return sum(values) / len(values) if values else None


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of ``values`` (divided by n, not by n - 1)."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


# ---- step log
#
# One JSON record a line, a whole line or none; `realsys.observe.step_log` reads it. The log grows with every step of a
# run, so lines are short: numbers keep the digits that mean something, and tickets are written as ranges.


DIGITS = 7  # significant digits: the precision of float32
DECIMALS = 3  # minimum number of decimals: unix seconds keep their milliseconds


class StepLog:
    """Writer of a step log. A file has one writer."""

    def __init__(self, path: Path, check_alive: CheckAlive = unleased) -> None:
        """Open the log for appending.

        ``check_alive`` is called before each record; ``append`` raises its errors.
        """
        self._path = path
        self._check_alive = check_alive
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                os.write(self._fd, b"\n")  # a crashed predecessor may have left half a line

    def append(self, record: Mapping[str, Any]) -> None:
        """Append ``record``.

        Raises RealsysError if the disk does not take all of it; then nothing of it stays in the
        file.
        """
        line = msgspec.json.encode(short(record)) + b"\n"
        self._check_alive()
        # One write call, so that a reader never sees two records mixed.
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            raise RealsysError(f"cannot write the step log {self._path}: {error.strerror}") from error
        if written < len(line):  # a file system with little space left writes a part
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            problem = f"cannot write the step log {self._path}: only {written} of {len(line)} bytes were written"
            raise RealsysError(f"{problem}: free space on this disk")

    def close(self) -> None:
        os.close(self._fd)


def short(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``record`` with rounded numbers, and with ranges for its list of ``tickets``."""
    rounded = {name: _rounded(value) for name, value in record.items()}
    return rounded | {"tickets": ticket_ranges(rounded["tickets"])} if "tickets" in rounded else rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, float) and value and math.isfinite(value):
        return round(value, max(DECIMALS, DIGITS - 1 - math.floor(math.log10(abs(value)))))
    return value


# ---- status page: phase of the run, and the fields of the last step


class RunStatus:
    """The phase of the run, in the step log, the heartbeat and the name store."""

    def __init__(self, ctx: WorkerContext, step_log: StepLog) -> None:
        self._ctx = ctx
        self._log = step_log
        self._phase = "start"
        self._fields: dict[str, Any] = {}

    async def enter(self, phase: str) -> None:
        """Begin ``phase``.

        Raises NameStoreError if the name store stays away for longer than a lease.
        """
        self._log.append({"kind": "phase", "phase": phase, "time": time.time()})
        self._ctx.set_state(phase)
        self._phase = phase
        await self.show({})

    async def show(self, fields: dict[str, Any]) -> None:
        """Publish ``fields`` for the status page; each stays until a later call replaces it."""
        self._fields.update(fields)
        value = msgspec.json.encode({"phase": self._phase, "time": time.time(), **self._fields}).decode()
        ctx = self._ctx
        await set_key(ctx.store, ctx.names.status, value, ctx.config.cluster.lease_s, ctx.check_alive)


# ---- monitor of the agreement between generation engine and trainer on log-probs
#
# It compares tokens whose log-probs both computed with the same weights: those of the version that is
# trained, and if the batch has none, those of an earlier version of which the trainer kept the weights.
#
#     AgreementSampler ──SnapshotPlan──> actor_inf, or actor_train where nothing else scores the batch,
#         before the first minibatch of a step
#         ──``agreement/...`` statistics──> AgreementMonitor
#         ──> step record, status page; a warning in the log when it drifts
#
# Their difference is due to numerics only: kernels, precision, batch shapes. It enters every importance
# weight. If an engine computes with wrong weights, another temperature or another attention, this is
# the first statistic that shows it; all others look as they do with stale samples.


log = logging.getLogger(__name__)

AGREEMENT = "agreement/"  # prefix of the statistics
SAMPLE_TOKENS = 2048  # scored with kept weights: the mean is exact to a few percent, and takes no time to speak of
_WINDOW = 8  # steps in one mean: single batches differ by a factor of two
_GROWTH = 4.0  # of a mean since the first steps, above which it drifts
_FLOOR = 1e-4  # nats per token below which growth is numerical noise


class AgreementSampler:
    """Decides when the trainer keeps the weights of a version, and what it scores with them.

    In an asynchronous run the batch at version v has tokens of v - eta to v - 1. The weights of one version
    s are kept until a batch has tokens of s; these are scored, and the weights of that step are kept next.
    Tokens of v itself need no kept weights, and no plan if the step scores its whole batch (``scores_all``).
    """

    def __init__(self, eta: int, sample_tokens: int = SAMPLE_TOKENS, *, scores_all: bool = True) -> None:
        self._sample_tokens = sample_tokens
        self._scores_all = scores_all
        self._expiry = 2 * (eta + 1)  # steps after which no token of the kept version is expected any more
        self._kept: int | None = None

    def plan(self, version: int, samples: Sequence[SampleMeta]) -> SnapshotPlan | None:
        """Return what to score before the step that trains ``version``, and whether to keep its weights.

        ``samples``: those of data rank 0, which has the copy. Log-probs under a grammar are not compared.
        """
        if not self._sample_tokens:
            return None
        samples = [sample for sample in samples if not sample.metrics.get(CONSTRAINED)]
        if any(sample.version_max >= version for sample in samples):
            return None if self._scores_all else SnapshotPlan(version, self._select(version, samples))
        plan = SnapshotPlan()
        if self._kept is not None:
            plan.version, plan.samples = self._kept, self._select(self._kept, samples)
        if self._kept is None or plan.samples or version - self._kept > self._expiry:
            plan.take, self._kept = True, version
        return plan if plan.take else None

    def _select(self, version: int, samples: Sequence[SampleMeta]) -> list[str]:
        """Return samples with tokens of ``version``: as many as reach ``sample_tokens``, at least one."""
        selected, tokens = [], 0
        for sample in samples:
            if tokens < self._sample_tokens and sample.version_min <= version <= sample.version_max:
                selected.append(sample.sample_id)
                tokens += sample.loss_tokens
        return selected


class AgreementMonitor:
    """Compares each step with a threshold, and the last steps with the first ones.

    Steps without such tokens are skipped. ``threshold``: ``train.engine_check``; 0: no warnings.
    """

    def __init__(self, threshold: float, window: int = _WINDOW) -> None:
        self._threshold = threshold
        self._window = window
        self._first: list[tuple[float, float]] = []  # (tokens, mean difference) of the first steps that had any
        self._last: deque[tuple[float, float]] = deque(maxlen=window)
        self._warning = ""

    def observe(self, version: int, stats: Mapping[str, float]) -> dict[str, Any]:
        """Add one step, trained on ``version``; return its values to show, with ``warning`` ("" if all is well).

        ``stats``: statistics of the call that compared. Values are None if the step had no such tokens.
        """
        values = {key.removeprefix(AGREEMENT): value for key, value in stats.items() if key.startswith(AGREEMENT)}
        tokens = values.get("tokens", 0.0)
        mean = values.get("difference_mean")
        warning = self._warning_of(tokens, mean) if mean is not None else ""
        if warning and not self._warning:
            log.warning("log-probs of engine and trainer disagree at version %d: %s", version, warning)
        elif self._warning and not warning:
            log.warning("log-probs of engine and trainer agree again at version %d", version)
        self._warning = warning
        return {
            "version": version,
            "tokens": int(tokens),
            "difference_mean": mean,
            "difference_max": values.get("difference_max"),
            "ratio": values.get("ratio"),
            "warning": warning,
        }

    def _warning_of(self, tokens: float, mean: float) -> str:
        if not self._threshold:
            return ""
        if len(self._first) < self._window:
            self._first.append((tokens, mean))
        else:
            self._last.append((tokens, mean))
        if not mean <= self._threshold:  # NaN warns, too
            return f"mean difference {mean:.2g} nats per token is over train.engine_check={self._threshold:g}"
        if len(self._last) < self._window:
            return ""
        before, now = _mean_agreement(self._first), _mean_agreement(self._last)
        if now > _GROWTH * max(before, _FLOOR):
            return f"mean difference grew from {before:.2g} to {now:.2g} nats per token over the run"
        return ""


def _mean_agreement(steps: list[tuple[float, float]] | deque[tuple[float, float]]) -> float:
    """Return the mean over tokens."""
    return sum(tokens * mean for tokens, mean in steps) / sum(tokens for tokens, _ in steps)
