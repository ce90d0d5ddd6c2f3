"""The statistics of a train batch that go into the step log, from metadata and from what the calls reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from realsys.master.agreement import PREFIX as AGREEMENT
from realsys.master.executor import CallResult
from realsys.types import SampleMeta


def batch_statistics(samples: Sequence[SampleMeta], *, version: int, correct_reward: float) -> dict[str, Any]:
    """What a train batch was, from metadata alone. ``version`` is that of the weights it is trained with.

    Staleness of a sequence is ``version`` minus the version of its oldest token.
    """
    correct = [s for s in samples if s.reward >= correct_reward]
    wrong = [s for s in samples if s.reward < correct_reward]
    lags = [version - s.version_min for s in samples]
    histogram = Counter(lags)
    return {
        "groups": len({s.ticket_id for s in samples}),
        "sequences": len(samples),
        "tokens": sum(s.length for s in samples),
        "answer_tokens": sum(s.answer_len for s in samples),
        "reward_mean": _mean([s.reward for s in samples]),
        "accuracy": len(correct) / len(samples),
        "length_mean": _mean([s.answer_len for s in samples]),
        "length_max": max(s.answer_len for s in samples),
        "length_correct": _mean([s.answer_len for s in correct]),
        "length_wrong": _mean([s.answer_len for s in wrong]),
        "truncated_fraction": sum(s.truncated for s in samples) / len(samples),
        # begun with one version of the weights and ended with a later one
        "interrupted_fraction": sum(s.version_min < s.version_max for s in samples) / len(samples),
        "staleness": {
            "min": min(version - s.version_max for s in samples),
            "mean": _mean(lags),
            "max": max(lags),
            "histogram": {str(lag): histogram[lag] for lag in sorted(histogram)},
        },
    }


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
