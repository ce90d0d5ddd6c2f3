"""Completions of evaluations on disk, and their result.

    {trial}/evaluations/{eval_id}/parts/{worker}.jsonl    lines that RolloutWorkers append, any attempt
                                  samples.jsonl           one line per completion that counts, by problem and sample
                                  result.json             the step log's record; written last

A RolloutWorker appends a completion before it reports its end, so every completion that counts is there.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from realsys.config.evaluation_sets import EvaluationSet
from realsys.config.schema_data import HELD_OUT
from realsys.errors import MALFORMED, RecordError
from realsys.observe.percent import percent

SAMPLES, RESULT, PARTS = "samples.jsonl", "result.json", "parts"


class EvalSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One completion of an evaluation, with its verdict.

    problem    index of the prompt in its split
    sample     number of the completion of this problem, from 0
    answer     final answer that the verifier found in the completion; None without one
    reference  the reference answer of the problem
    correct    None if the task has no right or wrong
    tokens     sampled tokens
    """

    eval_id: str
    set: str
    problem: int
    sample: int
    attempt: int
    version_min: int
    version_max: int
    prompt: str
    completion: str
    reference: str
    reward: float
    correct: bool | None
    finish_reason: str
    tokens: int
    answer: str | None = None
    metrics: dict[str, float] = {}
    worker: str = ""
    seed: int = 0

    @property
    def unit(self) -> tuple[int, int, int]:
        """Return what tells it apart in its evaluation."""
        return self.problem, self.sample, self.attempt


def append_sample(folder: Path, worker: str, sample: EvalSample) -> None:
    """Append a completion to the part of ``worker``. ``folder``: of the evaluation. Raises OSError."""
    parts = folder / PARTS
    parts.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", worker) or "worker"
    # One write: a reader may meet a line that is cut off at its end, but never a mixture of two.
    with (parts / f"{name}.jsonl").open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(sample) + b"\n")


def collect(folder: Path, counted: Iterable[tuple[int, int, int]]) -> list[EvalSample]:
    """Return the completions that count, (problem, sample, attempt), in their order, from the workers' parts.

    One that is not there, because its worker could not write it to this disk, is left out. An evaluation that was
    stored before its record reached the step log has no parts any more; then its own file has them.
    """
    found: dict[tuple[int, int, int], EvalSample] = {}
    for part in [*sorted((folder / PARTS).glob("*.jsonl")), *folder.glob(SAMPLES)]:
        found |= {sample.unit: sample for sample in _lines(part)}
    return [found[unit] for unit in sorted(counted) if unit in found]


def write_result(folder: Path, samples: Iterable[EvalSample], result: Mapping[str, Any]) -> None:
    """Store the completions that count and the result, and remove the workers' parts. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / SAMPLES, b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples))
    _replace(folder / RESULT, msgspec.json.encode(result) + b"\n")
    shutil.rmtree(folder / PARTS, ignore_errors=True)


def read_samples(folder: Path) -> list[EvalSample]:
    """Return the completions of a finished evaluation, by problem and sample. Raises RecordError."""
    path = folder / SAMPLES
    if not path.is_file():
        raise RecordError(f"{folder}: no completions are stored: the evaluation has not ended")
    return sorted(_lines(path), key=lambda sample: sample.unit)


def read_result(folder: Path) -> dict[str, Any]:
    """Return the step log's record of a finished evaluation. Raises RecordError."""
    try:
        result: dict[str, Any] = msgspec.json.decode((folder / RESULT).read_bytes(), type=dict[str, Any])
    except (OSError, *MALFORMED) as error:
        raise RecordError(f"{folder / RESULT}: cannot be read: {error}") from None
    return result


def stored_evaluations(root: Path) -> list[str]:
    """Return the ids of the evaluations with stored completions, oldest first. ``root``: ``paths.evaluations``."""
    folders = [path for path in root.glob("*") if (path / SAMPLES).is_file()]
    return [path.name for path in sorted(folders, key=lambda path: (path / SAMPLES).stat().st_mtime_ns)]


def _lines(path: Path) -> Iterator[EvalSample]:
    """Yield the samples of a file. A last line that was cut off is not one. Raises RecordError for any other."""
    decoder = msgspec.json.Decoder(EvalSample)
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            return
        try:
            yield decoder.decode(line)
        except MALFORMED as error:
            raise RecordError(f"{path}:{number}: is not a completion of an evaluation: {error}") from None


def _replace(path: Path, content: bytes) -> None:
    staged = path.with_name(f".{path.name}.tmp")
    staged.write_bytes(content)
    os.replace(staged, path)


# ---- eval records
#
# The step log's record of an evaluation: numbers with intervals if it is complete, else the reason why it has none.


_NO_NUMBERS: dict[str, Any] = {"pass_at": {}, "metrics": {}, "majority": None}


class EvaluationOutcome(msgspec.Struct, frozen=True):
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


def record(eval_id: str, step: int, made: EvaluationSet, outcome: EvaluationOutcome, seconds: float) -> dict[str, Any]:
    """Return the record without a majority vote: ``docs/metrics.md`` has its fields."""
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
    ``briefly``: only the number: `accuracy 83.4% ± 2.3`. That of rows that are not sampled begins with `loss 0.693`.
    """
    if reason := incomplete_reason(result):
        return f"incomplete: {reason}"
    accuracy, reward = result.get("accuracy"), result.get("reward_mean")
    lost = f"loss {loss:.3f}, " if isinstance(loss := result.get("loss"), int | float) else ""
    if not isinstance(accuracy, int | float):
        found = f"reward {reward:.3f}" if isinstance(reward, int | float) else "no verdicts"
        return found if briefly else f"{found} ({asked(result)})"
    if briefly:
        return f"{lost}accuracy {percent(accuracy)}{margin(result)}"
    return ", ".join([f"{lost}accuracy {percent(accuracy)}{margin(result)} ({asked(result)})", *further(result)])


def asked(result: Mapping[str, Any]) -> str:
    """Return the completions of an evaluation: `96 problems x 4, 3 of 384 failed`."""
    problems, samples = result.get("problems"), result.get("samples") or 1
    things = "lines" if "loss" in result else "problems"
    text = f"{problems} {things} x {samples}" if samples != 1 else f"{problems} {things}"
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


# ---- numbers of an evaluation from the verdicts of its completions. Pure
#
#     n completions of each problem, c of them right ──> pass@1 = mean of c / n over the problems
#                                                    ──> pass@k, unbiased (Chen et al. 2021, arXiv 2107.03374, eq. 1)
#                                                    ──> interval, with the problems as clusters
#
# The completions of a problem depend on each other, so the problem is the unit of every error: the variance is that of
# the means over problems (Miller 2024, arXiv 2411.00640, section 2.2).
#
# The interval is the one of Wilson (1927) with an effective sample size, p (1 - p) / s^2, where s^2 is the variance of
# the mean over clusters (Franco et al. 2019, Journal of Survey Statistics and Methodology 7(3), section 2). With one
# completion per problem that is exactly Wilson's interval. Unlike p +- 1.96 s it stays in [0, 1], and it has a width
# if all problems are right.


Z95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


class Tally(NamedTuple):
    """Verdicts on one problem: ``right`` of ``judged`` completions."""

    judged: int
    right: int


class Estimate(msgspec.Struct, frozen=True):
    """A share with its 95 % interval and the standard error over problems, all in [0, 1]."""

    value: float
    low: float
    high: float
    stderr: float

    @property
    def margin(self) -> float:
        """Return half of the interval's width."""
        return (self.high - self.low) / 2


class Statistics(msgspec.Struct, frozen=True):
    """Numbers of one evaluation. ``pass_at``: k -> estimate, with k = 1; empty if no completion is right or wrong."""

    problems: int
    completions: int
    pass_at: dict[int, Estimate]

    @property
    def accuracy(self) -> Estimate | None:
        return self.pass_at.get(1)


def summarize(tallies: Iterable[Tally], k: Sequence[int] = ()) -> Statistics:
    """Return pass@1 and pass@k of the problems with verdicts. A k is left out if a problem has fewer verdicts."""
    judged = [tally for tally in tallies if tally.judged]
    completions = sum(tally.judged for tally in judged)
    fewest = min((tally.judged for tally in judged), default=0)
    values = {
        size: [pass_at_k(tally.judged, tally.right, size) for tally in judged]
        for size in sorted({1, *k})
        if size <= fewest
    }
    pass_at = {size: estimate(of_problems, completions) for size, of_problems in values.items()}
    return Statistics(len(judged), completions, pass_at)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that one of k completions is right, without bias, from c right ones of n.

    It is 1 - C(n - c, k) / C(n, k), as a product, which has no large numbers. Raises ValueError unless
    0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k of n={n}, c={c}, k={k}: c must be in 0..n, and k in 1..n")
    if k == 1:
        return c / n
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def estimate(values: Sequence[float], completions: int) -> Estimate:
    """Return the mean of one value in [0, 1] per problem, with its error. Raises ValueError without a value.

    ``completions``: their number bounds the effective sample size.
    """
    count = len(values)
    if not count:
        raise ValueError("an estimate needs at least one problem")
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / count**2
    return _estimate(mean, variance, count, completions)


def pooled(tallies: Iterable[Tally]) -> Estimate | None:
    """Return the share of right ones among all judged completions, with the problems as clusters; None without any.

    A problem counts by its completions. With as many of each problem this is the mean over problems.
    """
    judged = [tally for tally in tallies if tally.judged]
    completions = sum(tally.judged for tally in judged)
    if not completions:
        return None
    share = sum(tally.right for tally in judged) / completions
    variance = math.fsum((tally.right - share * tally.judged) ** 2 for tally in judged) / completions**2
    return _estimate(share, variance, len(judged), completions)


def _estimate(share: float, variance: float, problems: int, completions: int) -> Estimate:
    low, high = wilson(share, effective_size(share, variance, problems, completions))
    stderr = math.sqrt(variance * problems / (problems - 1)) if problems > 1 else 0.0
    return Estimate(share, low, high, stderr)


def effective_size(mean: float, variance: float, problems: int, completions: int) -> float:
    """Return how many independent completions have the same ``variance`` of their mean.

    At least the number of problems, and at most that of completions: equal means of few problems prove little.
    """
    spread = mean * (1.0 - mean)
    if spread <= 0.0:
        return float(problems)
    most = float(max(problems, completions))
    return min(most, max(float(problems), spread / variance)) if variance > 0.0 else most


def wilson(share: float, size: float, z: float = Z95) -> tuple[float, float]:
    """Return Wilson's score interval of ``share`` of ``size`` trials."""
    z2 = z * z
    centre = (share + z2 / (2 * size)) / (1 + z2 / size)
    half = z / (1 + z2 / size) * math.sqrt(share * (1 - share) / size + z2 / (4 * size * size))
    low = 0.0 if share == 0.0 else max(0.0, centre - half)
    return low, 1.0 if share == 1.0 else min(1.0, centre + half)


# ---- majority vote over the final answers of a problem's completions (self-consistency, arXiv 2203.11171). Pure
#
# The answer that most completions agree on is the vote. With a tie, each of the tied answers counts in part: the result
# is the expected value of a random choice among them. A completion without a final answer votes for nothing.


#: Tells whether two final answers are the same; called only for different texts.
Same = Callable[[str, str], bool]
#: Returns the comparison of final answers for the completions of one problem; None: by their texts.
SameOf = Callable[[Sequence[EvalSample]], Same | None]


class Vote(NamedTuple):
    """The final answer of one completion, None if it has none, and its verdict."""

    answer: str | None
    correct: bool


def majority(votes: Sequence[Vote], same: Same | None = None) -> float:
    """Return the probability, from 0 to 1, that the majority vote is right. Without any final answer it is wrong.

    All right answers agree with each other, because each equals the reference. So ``same`` compares the wrong ones
    only, and only if they could win or tie. Without ``same`` different texts are different answers.
    """
    right = sum(vote.correct and vote.answer is not None for vote in votes)
    wrong = [vote.answer for vote in votes if vote.answer is not None and not vote.correct]
    if not right:
        return 0.0
    if right > len(wrong):
        return 1.0
    counts = _groups(Counter(wrong), same)
    largest = max(counts)
    if right != largest:
        return float(right > largest)
    return 1.0 / (1 + counts.count(largest))


def _groups(texts: Counter[str], same: Same | None) -> list[int]:
    """Return the size of each group of equal answers."""
    if same is None:
        return list(texts.values())
    groups: dict[str, int] = {}
    for text, count in texts.items():
        first = next((first for first in groups if same(text, first)), text)
        groups[first] = groups.get(first, 0) + count
    return list(groups.values())
