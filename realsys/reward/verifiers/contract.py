"""The contract of a verifier: a function ``(item, **arguments) -> bool | float | Verdict``, run in a verifier process.

A verifier that cannot tell raises; it never returns False or 0 for that. It may take long, hang, crash or print: its
process bounds that (``pool.py``). ``arguments`` are ``data.verifier_args``. ``declare`` adds what a verifier knows
about its references and its limits.
"""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Callable
from numbers import Real
from typing import Any, TypeVar

import msgspec

MAX_REWARD = 1e6  # greatest size of a reward and of a bonus: their sum is finite
MAX_METRICS = 32  # metrics of one verdict
MAX_ANSWER = 2000  # characters of a final answer that are kept
MAX_METRIC_NAME = 100  # printable characters


class Item(msgspec.Struct, array_like=True):
    """One completion to verify. ``extra``: the keys of the dataset row other than prompt and answer, unchanged."""

    prompt: str
    completion: str
    answer: str  # the reference
    extra: dict[str, Any] = {}


class Verdict(msgspec.Struct, array_like=True, tag="verdict"):
    """The judgement of a verifier on a completion.

    reward   from -1e6 to 1e6; None: rollout.reward.correct or .wrong, by ``correct``
    correct  None if the task has no right or wrong; then there must be a reward
    metrics  numbers for the step log, averaged over episodes by name
    bonus    from -1e6 to 1e6; added to the reward
    answer   final answer of the completion, for the majority vote of an evaluation; None if the verifier knows none
    """

    reward: float | None = None
    correct: bool | None = None
    metrics: dict[str, float] = {}
    bonus: float = 0.0
    answer: str | None = None


#: A bool is ``Verdict(correct=...)``, a float (or int) is ``Verdict(reward=...)``.
Verifier = Callable[..., "bool | float | Verdict"]
#: ``(item)``, and by name the arguments of the verifier that it needs. Returns why the reference of an item, which has
#: no completion, cannot be used; None if it can.
CheckAnswer = Callable[..., str | None]

V = TypeVar("V", bound=Verifier)


def declare(
    *, check_answer: CheckAnswer | None = None, wrong_over_limit: bool = False, compares_answers: bool = False
) -> Callable[[V], V]:
    """Add declarations to a verifier.

    check_answer      checks every reference before a run starts; a verifier without it takes any reference
    wrong_over_limit  True: a completion that takes more than rollout.reward.timeout_s of CPU time is wrong. False: it
                      has no verdict.
    compares_answers  True: called with the final answer of another completion as the reference, it tells if the two
                      agree. False: final answers agree if their texts are equal.
    """

    def decorate(verifier: V) -> V:
        declared: Any = verifier
        declared.check_answer, declared.wrong_over_limit = check_answer, wrong_over_limit
        declared.compares_answers = compares_answers
        return verifier

    return decorate


def wrong_over_limit(verifier: Verifier) -> bool:
    """Return True if the verifier declares that a completion over the limit of CPU time is wrong."""
    return bool(getattr(verifier, "wrong_over_limit", False))


def answer_problem(verifier: Verifier, item: Item) -> str | None:
    """Return why the verifier cannot use the reference of an item; None if it can, or does not check references."""
    check = getattr(verifier, "check_answer", None)
    problem = check(item, **_taken(check, verifier)) if check is not None else None
    if problem is not None and not isinstance(problem, str):
        raise TypeError(f"check_answer returned {reprlib.repr(problem)}: return the reason as a text, or None")
    return problem


def _taken(check: CheckAnswer, verifier: Verifier) -> dict[str, Any]:
    """Return the arguments of the verifier that its check takes, too."""
    arguments = getattr(verifier, "keywords", {})  # the pool makes a ``partial`` of verifier and arguments
    names = inspect.signature(check).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in names.values())
    return {name: value for name, value in arguments.items() if takes_all or name in names}


def verdict_of(result: object) -> Verdict:
    """Turn what a verifier returned into a checked Verdict. Raises TypeError or ValueError for anything else."""
    if isinstance(result, bool):
        return Verdict(correct=result)
    if isinstance(result, Real):
        return Verdict(reward=_reward("returned", result))
    if not isinstance(result, Verdict):
        raise TypeError(f"returned {reprlib.repr(result)}: return a bool, a finite number or a Verdict")
    reward, correct = result.reward, result.correct
    if reward is None and correct is None:
        raise ValueError("returned a Verdict with neither reward nor correct: set one of them")
    if correct is not None and not isinstance(correct, bool):
        raise TypeError(f"returned a Verdict with correct={reprlib.repr(correct)}: must be True, False or None")
    if reward is not None:
        reward = _reward("returned a Verdict with reward", reward)
    bonus = _reward("returned a Verdict with bonus", result.bonus)
    answer = result.answer
    if answer is not None and not isinstance(answer, str):
        raise TypeError(f"returned a Verdict with answer={reprlib.repr(answer)}: must be a text or None")
    if not isinstance(result.metrics, dict) or len(result.metrics) > MAX_METRICS:
        problem = f"must be a dict with at most {MAX_METRICS} names"
        raise TypeError(f"returned a Verdict with metrics={reprlib.repr(result.metrics)}: {problem}")
    checked = {}
    for name, value in result.metrics.items():
        if not is_metric_name(name):
            problem = f"must have 1 to {MAX_METRIC_NAME} printable characters"
            raise TypeError(f"returned a Verdict with the metric name {reprlib.repr(name)}: {problem}")
        # A bool is fine here: its average is a share.
        checked[name] = float(value) if isinstance(value, bool) else _finite(f"returned metric {name!r}", value)
    return Verdict(reward, correct, checked, bonus, answer and answer[:MAX_ANSWER])


def is_metric_name(name: object) -> bool:
    """Return True for a text that a metric may be called by, in messages and in the step log."""
    return isinstance(name, str) and name.isprintable() and 0 < len(name) <= MAX_METRIC_NAME


def _reward(described: str, value: object) -> float:
    number = _finite(described, value)
    if abs(number) > MAX_REWARD:
        raise ValueError(f"{described} {reprlib.repr(value)}: must be from {-MAX_REWARD:g} to {MAX_REWARD:g}")
    return number


def _finite(described: str, value: object) -> float:
    """Return ``value`` as a float. Numbers of numpy are numbers; bools are not."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{described} {reprlib.repr(value)}: must be a finite number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{described} {reprlib.repr(value)}: must be a finite number")
    return number
