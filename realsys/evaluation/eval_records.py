"""The step log's record of an evaluation: numbers with intervals if it is complete, else the reason why it has none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from realsys.config.evaluation_sets import EvaluationSet
from realsys.config.sections.schema_evaluation import HELD_OUT
from realsys.evaluation.estimates import Estimate, Statistics, Tally, estimate, summarize
from realsys.evaluation.stored_samples import EvalSample
from realsys.evaluation.votes import Same, Vote, majority
from realsys.telemetry.percent import percent

#: Returns the comparison of final answers for the completions of one problem; None: by their texts.
SameOf = Callable[[Sequence[EvalSample]], Same | None]


_NO_NUMBERS: dict[str, Any] = {"pass_at": {}, "metrics": {}, "majority": None}


class Outcome(msgspec.Struct, frozen=True):
    """Result of an evaluation's sampling.

    tallies     verdicts of each problem
    incomplete  why its numbers must not be shown, "" if they may
    failed      completions whose attempts all failed, of ``total``
    """

    tallies: list[Tally]
    incomplete: str
    failed: int
    total: int
    reward_mean: float | None
    length_mean: float
    version_min: int
    version_max: int
    metrics: dict[str, float] = {}
    restarts: int = 0


def record(eval_id: str, step: int, made: EvaluationSet, outcome: Outcome, seconds: float) -> dict[str, Any]:
    """Return the record without a majority vote: see ``docs/evaluation.md`` for its fields."""
    statistics = summarize(outcome.tallies, made.k)
    result: dict[str, Any] = {
        "kind": "eval",
        "time": time.time(),
        "eval_id": eval_id,
        "set": made.name,
        "step": step,
        "complete": not outcome.incomplete,
        "incomplete": outcome.incomplete,
        "problems": outcome.total // made.samples,
        "samples": made.samples,
        "failed": outcome.failed,
        "length_mean": outcome.length_mean,
        "version": outcome.version_min,
        "version_min": outcome.version_min,
        "version_max": outcome.version_max,
        "restarts": outcome.restarts,
        "temperature": made.sampling.temperature,
        "seconds": seconds,
        "accuracy": None,
        "interval": None,
        "stderr": None,
        "pass_at": {},
        "unjudged": 0,
        "left_out_k": [],
        "reward_mean": None,
        "metrics": {},
    }
    if not outcome.incomplete:
        result |= {"reward_mean": outcome.reward_mean, "metrics": outcome.metrics} | _numbers(statistics)
        if statistics.accuracy is not None:
            result["unjudged"] = result["problems"] - statistics.problems
            result["left_out_k"] = [k for k in made.k if k not in statistics.pass_at]
    return result


def _numbers(statistics: Statistics) -> dict[str, Any]:
    accuracy = statistics.accuracy
    if accuracy is None:
        return {}
    pass_at = {str(k): numbers_of(value) for k, value in statistics.pass_at.items()}
    interval = [accuracy.low, accuracy.high]
    return {"accuracy": accuracy.value, "interval": interval, "stderr": accuracy.stderr, "pass_at": pass_at}


def numbers_of(value: Estimate) -> dict[str, float]:
    """Return an estimate as the step log has it."""
    return {"value": value.value, "low": value.low, "high": value.high}


def majority_of(samples: Sequence[EvalSample], same_of: SameOf = lambda _: None) -> dict[str, float] | None:
    """Return the accuracy of majority votes, from the samples in the order of their problems.

    None if no problem has several completions, if no completion has a final answer (the verifier knows none), or if
    one has no right or wrong.
    """
    problems = [list(group) for _, group in groupby(samples, key=lambda sample: sample.problem)]
    is_voted = any(len(group) > 1 for group in problems) and any(sample.answer is not None for sample in samples)
    if not is_voted or any(sample.correct is None for sample in samples):
        return None
    shares = [
        majority([Vote(sample.answer, sample.correct is True) for sample in group], same_of(group))
        for group in problems
    ]
    return numbers_of(estimate(shares, len(shares)))


def is_held_out(result: Mapping[str, Any]) -> bool:
    """Return True for an evaluation of the held-out problems, False for one of another data set."""
    return result.get("set") in (None, HELD_OUT)


def headline(result: Mapping[str, Any], *, briefly: bool = False) -> str:
    """Return the result of an evaluation in one line: `accuracy 83.4% ± 2.3 (96 problems x 4)`.

    An incomplete one has no number: `incomplete: 3 of 96 failed`. What failures took from the numbers is named.
    ``briefly``: only the number: `accuracy 83.4% ± 2.3`.
    """
    if reason := incomplete_reason(result):
        return f"incomplete: {reason}"
    accuracy, reward = result.get("accuracy"), result.get("reward_mean")
    if not isinstance(accuracy, int | float):
        found = f"reward {reward:.3f}" if isinstance(reward, int | float) else "no verdicts"
        return found if briefly else f"{found} ({asked(result)})"
    if briefly:
        return f"accuracy {percent(accuracy)}{margin(result)}"
    return ", ".join([f"accuracy {percent(accuracy)}{margin(result)} ({asked(result)})", *further(result)])


def asked(result: Mapping[str, Any]) -> str:
    """Return the completions of an evaluation: `96 problems x 4, 3 of 384 failed`."""
    problems, samples = result.get("problems"), result.get("samples") or 1
    text = f"{problems} problems x {samples}" if samples != 1 else f"{problems} problems"
    if failed := result.get("failed"):
        text += f", {failed} of {problems * samples if isinstance(problems, int) else '?'} failed"
    return text


def margin(result: Mapping[str, Any]) -> str:
    """Return half of the width of the accuracy's interval, in points: ` ± 2.3`; "" without an interval."""
    interval = result.get("interval")
    if not isinstance(interval, list | tuple) or len(interval) != 2:
        return ""
    return f" ± {50 * (interval[1] - interval[0]):.1f}"


def further(result: Mapping[str, Any]) -> list[str]:
    """Return pass@k, the majority vote and the omissions, as phrases."""
    pass_at = result.get("pass_at") or {}
    parts = [f"pass@{k} {percent(value['value'])}" for k, value in pass_at.items() if k != "1"]
    if vote := result.get("majority"):
        parts.append(f"majority {percent(vote['value'])}")
    return parts + omissions(result)


def omissions(result: Mapping[str, Any]) -> list[str]:
    """Return what an evaluation lacks because completions failed within ``evaluation.max_failed``, or because the
    comparison of answers took too long, as phrases.
    """
    unjudged, problems = result.get("unjudged") or 0, result.get("problems")
    phrases = [f"{unjudged} of {problems} problems left out: all their completions failed"] if unjudged else []
    phrases += [f"no pass@{k}: a problem has fewer verdicts" for k in result.get("left_out_k") or []]
    return phrases + ([f"no majority: {reason}"] if (reason := result.get("majority_omitted")) else [])


def incomplete_reason(result: Mapping[str, Any]) -> str:
    """Return why an evaluation has no numbers; "" if it has. Records of older versions know failures only."""
    if "complete" in result:
        return "" if result["complete"] else str(result.get("incomplete") or "unknown reason")
    failed, done = result.get("failed") or 0, result.get("problems") or 0
    return f"{failed} of {done + failed} failed" if failed else ""


def without_incomplete(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a record of the step log, without its numbers if the evaluation is incomplete."""
    if not incomplete_reason(result):
        return result
    return {**result, "accuracy": None, "interval": None, "stderr": None, "reward_mean": None, **_NO_NUMBERS}
