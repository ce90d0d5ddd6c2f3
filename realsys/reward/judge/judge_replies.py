"""Reading of what an endpoint sent: a verdict, or the trouble with it. Pure.

body ──chat completion──> finish_reason, text ──JSON──> scores of exactly the criteria, each in its range
             └──────────────────┴──────────────┴──────────> Trouble
failed call ────────────────────────────────────────────────> Trouble
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from realsys.cluster.http_client import CallFailed
from realsys.config.sections.schema_judge import Criterion
from realsys.errors import MALFORMED
from realsys.reward.frames import ELAPSED, ENDPOINT, NO_VERDICT

_SHOWN = 100  # characters of a reply in a message
_FENCED = re.compile(r"```(?:json)?[ \t]*\n((?:(?!```).)*)\n?[ \t]*```\Z", re.DOTALL)
#: statuses for a request that the same endpoint will refuse again
_REFUSED = (400, 413, 422)  # may be the completion's fault: it is too long
_NEVER = (401, 402, 403, 404, 405, 410)  # key, address or model
_BUSY = (408, 425, 429, 502, 503, 504)
_QUOTA = ("insufficient_quota", "exceeded your current quota")  # a 429 that no wait mends


class Trouble(Exception):
    """Why a request gave no verdict, in one line.

    cause    one of ``frames.CAUSES``
    again    another request for the same completion may succeed
    fatal    no request of this run can succeed
    busy     the endpoint cannot serve any request now
    wait_s   seconds after which it wants the next request; 0: it did not say
    """

    def __init__(
        self,
        problem: str,
        cause: str = NO_VERDICT,
        *,
        again: bool = True,
        fatal: bool = False,
        busy: bool = False,
        wait_s: float = 0.0,
    ) -> None:
        self.cause = cause
        self.again = again
        self.fatal = fatal
        self.busy = busy
        self.wait_s = wait_s
        super().__init__(problem)


@dataclass(frozen=True, slots=True)
class Reply:
    """Scores by criterion, and the tokens of request and reply; None: the endpoint did not say."""

    scores: dict[str, float]
    tokens: int | None


class _Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    total_tokens: int = 0


class _ChatCompletion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_BODY = msgspec.json.Decoder(_ChatCompletion)
_ANY = msgspec.json.Decoder()


def trouble_of(failed: CallFailed) -> Trouble:
    """Return the trouble of a call that failed."""
    problem, status = str(failed), failed.status
    if not status:
        cause = ELAPSED if failed.timed_out else ENDPOINT
        return Trouble(problem, cause, busy=not failed.timed_out)
    if status in _NEVER or (status == 429 and any(text in failed.reason for text in _QUOTA)):
        return Trouble(problem, ENDPOINT, again=False, fatal=True)
    if status in _BUSY:
        return Trouble(problem, ENDPOINT, busy=True, wait_s=failed.retry_after_s)
    if status >= 500:
        return Trouble(problem, ENDPOINT)
    return Trouble(problem, ENDPOINT, again=False, fatal=status not in _REFUSED)


def read_tokens(body: bytes) -> int | None:
    """Return the tokens that a reply says it used, whatever else is in it; None if it says nothing."""
    try:
        usage = _BODY.decode(body).usage
    except MALFORMED:
        return None
    return usage.total_tokens if usage is not None and usage.total_tokens > 0 else None


def read_reply(body: bytes, criteria: Sequence[Criterion]) -> Reply:
    """Return the scores of a reply. Raises Trouble for anything but one complete verdict."""
    try:
        completion = _BODY.decode(body)
    except MALFORMED as error:
        raise Trouble(f"the reply is no chat completion: {error}") from None
    if not completion.choices:
        raise Trouble("the reply has no choices")
    choice = completion.choices[0]
    if choice.message.refusal:
        raise Trouble(f"the judge refused: {_shown(choice.message.refusal)}")
    if choice.finish_reason == "length":
        raise Trouble("the verdict was cut off (rollout.reward.judge.max_tokens)")
    if choice.finish_reason not in ("stop", None):
        raise Trouble(f"the verdict ended with finish_reason {_shown(choice.finish_reason)}")
    scores = _scores(choice.message.content or "", criteria)
    return Reply(scores, read_tokens(body))


def _scores(text: str, criteria: Sequence[Criterion]) -> dict[str, float]:
    try:
        verdict = _ANY.decode(_json_part(text).encode("utf-8", "replace"))
    except MALFORMED:
        raise Trouble(f"the verdict is no JSON: {_shown(text)}") from None
    scores = verdict.get("scores") if isinstance(verdict, dict) else None
    if not isinstance(scores, dict):
        raise Trouble(f"the verdict has no object scores: {_shown(text)}")
    names = {criterion.name for criterion in criteria}
    if different := sorted(names.symmetric_difference(scores)):
        problem = "lacks a score for" if different[0] in names else "scores what is no criterion:"
        raise Trouble(f"the verdict {problem} {_shown(different[0])}")
    return {criterion.name: _score(criterion, scores[criterion.name]) for criterion in criteria}


def _score(criterion: Criterion, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Trouble(f"the score of {criterion.name} is {_shown(value)}: it must be a number")
    if not criterion.low <= value <= criterion.high:  # NaN, too
        problem = f"is {_shown(value)}: it must be from {criterion.low:g} to {criterion.high:g}"
        raise Trouble(f"the score of {criterion.name} {problem}")
    return float(value)


def _json_part(text: str) -> str:
    """Return the text without a thinking part before it, or the fenced block at its end."""
    text = text.strip()
    if text.startswith("<think>"):
        text = text.rpartition("</think>")[2].strip()
    fenced = _FENCED.search(text)
    return fenced[1] if fenced else text


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return " ".join(text[: 2 * _SHOWN].split())[:_SHOWN] or "(empty)"
