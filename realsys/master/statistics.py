"""The statistics of a train batch that go into the step log, from metadata and from what the calls reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realsys.master.calls.executor import CallResult
from realsys.master.records.agreement import PREFIX as AGREEMENT
from realsys.types import SampleMeta


@dataclass(frozen=True, slots=True)
class EpisodeMeta:
    """An episode as its rows describe it."""

    reward: float
    correct: bool | None
    truncated: bool
    tokens: int  # loss tokens of all its rows
    metrics: Mapping[str, float]


def episodes_of(samples: Sequence[SampleMeta]) -> list[EpisodeMeta]:
    """The episodes of a batch, each once, in the order of their first rows."""
    first: dict[tuple[str, int], SampleMeta] = {}
    for sample in samples:
        first.setdefault((sample.ticket_id, sample.episode), sample)
    return [
        EpisodeMeta(s.reward, s.correct, s.truncated, s.episode_tokens or s.loss_tokens, s.metrics)
        for s in first.values()
    ]


def batch_statistics(samples: Sequence[SampleMeta], *, version: int) -> dict[str, Any]:
    """Statistics of a train batch, from metadata alone. ``version`` is that of the weights it is trained with.

    Rewards, lengths and ``metrics`` are means over episodes; ``accuracy`` is over those whose correctness is known, and
    None without any. Staleness of a row is ``version`` minus the version of its oldest token.
    """
    episodes = episodes_of(samples)
    judged = [e for e in episodes if e.correct is not None]
    lags = [version - s.version_min for s in samples]
    histogram = Counter(lags)
    return {
        "groups": len({s.ticket_id for s in samples}),
        "episodes": len(episodes),
        "sequences": len(samples),
        "tokens": sum(s.length for s in samples),
        "answer_tokens": sum(s.loss_tokens for s in samples),
        "reward_mean": _mean([e.reward for e in episodes]),
        "accuracy": _mean([float(bool(e.correct)) for e in judged]),
        "length_mean": _mean([e.tokens for e in episodes]),
        "length_max": max(e.tokens for e in episodes),
        "length_correct": _mean([e.tokens for e in judged if e.correct]),
        "length_wrong": _mean([e.tokens for e in judged if not e.correct]),
        "truncated_fraction": _mean([float(e.truncated) for e in episodes]),
        # begun with one version of the weights and ended with a later one
        "interrupted_fraction": sum(s.version_min < s.version_max for s in samples) / len(samples),
        "metrics": mean_metrics(e.metrics for e in episodes),
        "staleness": {
            "min": min(version - s.version_max for s in samples),
            "mean": _mean(lags),
            "max": max(lags),
            "histogram": {str(lag): histogram[lag] for lag in sorted(histogram)},
        },
    }


def mean_metrics(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """For each name the mean over the episodes that have it."""
    values: dict[str, list[float]] = {}
    for own in metrics:
        for name, value in own.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in sorted(values.items())}


def call_seconds(results: Mapping[str, CallResult], training: Collection[str]) -> dict[str, float]:
    """How the time of a graph splits: ``train`` while any call of ``training`` was under way, ``inf`` the rest.

    Calls overlap, so this is no sum over calls; the two add up to the time from the first sending to the last reply.
    """
    intervals = sorted((result.began, result.ended) for name, result in results.items() if name in training)
    trained, covered = 0.0, float("-inf")
    for began, ended in intervals:
        trained += max(0.0, ended - max(began, covered))
        covered = max(covered, ended)
    everything = max(r.ended for r in results.values()) - min(r.began for r in results.values())
    return {"inf": everything - trained, "train": trained}


def train_record(
    statistics: Mapping[str, Any], seconds: Mapping[str, float], results: Mapping[str, CallResult]
) -> dict[str, Any]:
    """What a train step was, for the step log: the batch, the time, and what the calls reported.

    ``seconds`` are of the parts of the step and its ``total``; ``call_seconds`` of each call's slowest rank, without
    waiting for others on its workers. Statistics of calls other than ``actor_train`` carry the call's name in front,
    shortened for the actor's: ``inf/tokens``, ``critic_train/loss``. Those of a group of their own keep its name:
    ``agreement/ratio``.
    """
    stats: dict[str, float] = {}
    for name, result in results.items():
        prefix = "" if name == "actor_train" else f"{name.removeprefix('actor_')}/"
        stats |= {key if key.startswith(AGREEMENT) else f"{prefix}{key}": value for key, value in result.stats.items()}
    return {
        "seconds": dict(seconds),
        "call_seconds": {name: result.seconds for name, result in results.items()},
        "transferred_bytes": sum(result.received for result in results.values()),
        "train_tokens_per_s": statistics["tokens"] / max(1e-9, seconds["inf"] + seconds["train"]),
        "consumed_tokens_per_s": statistics["answer_tokens"] / max(1e-9, seconds["total"]),
        "stats": stats,
        **statistics,
    }


def _mean(values: Sequence[float]) -> float | None:
    """None where there is nothing to average: an absent number is not zero."""
    return sum(values) / len(values) if values else None
