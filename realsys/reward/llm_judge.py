"""LlmJudge: judges completions by a model behind an OpenAI endpoint, in the place of verifier processes.

    item ──rubric──> messages ──gate──> POST /chat/completions ──> scores ──> Verdict
              │                 ^                  └─ Trouble ──┬─ no request can succeed: StuckError
              │                 │                               ├─ another one would not help: RewardError
              │                 ├── at most ``retries`` times ──┤ malformed, too late, status 500
              │                 └── for at most ``outage_s`` ───┘ busy or unreachable: all requests pause
              └─ a key is missing: RewardError

`error-is-not-data`: there is a verdict only if the endpoint sent a complete one, with a score of every criterion in its
range.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from realsys.cluster.http_client import CallFailed, HttpClient
from realsys.config.schema import Config
from realsys.errors import MALFORMED, NoVerifierError, RealsysError, RewardError, StuckError
from realsys.reward.pool import Verifiers
from realsys.reward.rubric import Criterion, Rubric, RubricError, check_judge
from realsys.reward.verifier_protocol import ELAPSED, ENDPOINT, NO_VERDICT, RAISED
from realsys.reward.verifiers.contract import Item, Verdict

log = logging.getLogger(__name__)

FIRST_DELAY_S = 1.0  # pause of a busy endpoint that asks for none; doubles each time
LAST_DELAY_S = 60.0
_MAX_REPLY = 4 << 20  # bytes
_BYTES_PER_TOKEN = 3  # reserved: English text has about 4, and most other text 3
_LOGGED = 20  # troubles of one endpoint that are logged; all are counted


@dataclass(slots=True)
class _Asking:
    """One item that waits for its verdict."""

    messages: list[dict[str, str]]
    delay_s: float  # next pause, if the endpoint asks for none
    failed: int = 0  # requests that count towards ``retries``
    busy_since: float | None = None  # time of the first answer of an endpoint that is busy
    malformed: bool = False  # a verdict was malformed, so another sample is wanted
    requests: int = 0
    seconds: float = 0.0  # duration of its requests
    waited_s: float = 0.0  # time before them, because of the limits
    tokens: int = 0


class LlmJudge(Verifiers):
    """Judge of one process, for one event loop. It has its share of the limits: 1 of ``sharers``."""

    @staticmethod
    def check(config: Config) -> None:
        """Check the settings before anything starts. Raises ConfigError."""
        check_judge(config)

    def __init__(self, config: Config, sharers: int = 1, *, first_delay_s: float = FIRST_DELAY_S) -> None:
        """Read settings and key. Raises ConfigError."""
        super().__init__()
        judge = check_judge(config)
        self._config = judge
        self._ends = config.rollout.reward.wrong, config.rollout.reward.correct
        self._rubric = Rubric(judge)
        self._url = judge.base_url.rstrip("/") + "/chat/completions"
        self._key = os.environ[judge.api_key_env].strip() if judge.api_key_env else ""
        self._client = HttpClient(key=self._key, max_reply=_MAX_REPLY)
        limits = (judge.concurrency, judge.requests_per_minute, judge.tokens_per_minute)
        concurrency, requests, tokens = (limit // sharers for limit in limits)
        self._gate = RequestGate(RateLimits(concurrency, requests, tokens))
        self._first_delay_s = first_delay_s
        self._accepted = False  # the endpoint has answered a request: a refusal is then the completion's fault
        self._refused: StuckError | None = None  # the endpoint will refuse every request: none is sent any more
        self._troubles = 0
        self._closed = False

    @property
    def waiting(self) -> int:
        """Number of items whose request has not started."""
        return self._gate.waiting

    async def check_answer(self, name: str, item: Item) -> str | None:
        """Return the first key of the rubric that the row lacks; None if it has all."""
        return self._rubric.problem(item)

    async def verify(self, name: str, item: Item) -> Verdict:
        """Judge one completion. The reward is between rollout.reward.wrong and .correct.

        Raises RewardError without a verdict, StuckError if the endpoint will refuse every request, NoVerifierError
        after many completions without a verdict.
        """
        if self._closed:
            raise NoVerifierError("the judge is closed")
        try:
            asking = _Asking(self._rubric.messages(item), self._first_delay_s)
            reply = await self._ask(asking)
        except RubricError as error:
            raise self._failed(RewardError(f"the judge was not asked: {error}", RAISED)) from None
        except RewardError as error:
            raise self._failed(error) from None
        self._count_verdict()
        share = self._rubric.share(reply.scores)
        low, high = self._ends
        metrics = {f"judge/{name}": score for name, score in reply.scores.items()}
        metrics |= {
            "judge_seconds": asking.seconds,
            "judge_waited_s": asking.waited_s,
            "judge_retries": float(asking.requests - 1),
            "judge_tokens": float(asking.tokens),
        }
        return Verdict(low + (high - low) * share, share >= self._config.correct_from, metrics)

    async def close(self) -> None:
        """Close the connections; requests under way fail."""
        self._closed = True
        await self._client.close()

    def _failed(self, error: RewardError) -> RealsysError:
        self.undecided += 1
        return self._count_failure(error) or error

    async def _ask(self, asking: _Asking) -> JudgeReply:
        """Ask until there is a verdict. Raises RewardError or StuckError after trouble that no request can mend."""
        while True:
            try:
                return await self._request(asking)
            except Trouble as trouble:
                self._troubles += 1
                if self._troubles <= _LOGGED:
                    log.warning("judge: %s", self._hidden(trouble))
                if (error := self._final_error(trouble, asking)) is not None:
                    raise error from None
                if trouble.busy:
                    self._gate.pause(self._pause_s(trouble, asking))
                asking.malformed |= trouble.cause == NO_VERDICT

    def _final_error(self, trouble: Trouble, asking: _Asking) -> RealsysError | None:
        """Count the trouble of an item. Returns its error if no further request is sent for it."""
        described = f"the judge {self._url} (model {self._config.model!r}): {self._hidden(trouble)}"
        if trouble.busy:
            now = time.monotonic()
            asking.busy_since = asking.busy_since or now
            is_over = now - asking.busy_since >= self._config.outage_s
        else:
            asking.failed += 1
            asking.busy_since = None
            is_over = asking.failed > self._config.retries or not trouble.again
        # An endpoint that has never answered is a mistake in the settings, whatever the completion is.
        if trouble.fatal or (is_over and trouble.cause == ENDPOINT and not self._accepted):
            self._refused = StuckError(f"{described}: correct the verifier_args of the judge, or the endpoint")
            return self._refused
        return RewardError(described, trouble.cause) if is_over else None

    def _pause_s(self, trouble: Trouble, asking: _Asking) -> float:
        if trouble.wait_s:
            return min(trouble.wait_s, self._config.outage_s)
        pause_s, asking.delay_s = asking.delay_s, min(2 * asking.delay_s, LAST_DELAY_S)
        return pause_s

    async def _request(self, asking: _Asking) -> JudgeReply:
        """Send one request within the limits. Raises Trouble."""
        size = sum(len(message["content"].encode()) for message in asking.messages)
        begun = time.monotonic()
        started = await self._gate.enter(size // _BYTES_PER_TOKEN + self._config.max_tokens)
        sent, used = time.monotonic(), None
        asking.requests += 1
        asking.waited_s += sent - begun
        try:
            if self._refused is not None:
                raise self._refused
            raw = await self._client.call(self._url, self._body(asking), self._config.timeout_s)
            used = read_tokens(raw)
            asking.tokens += used or 0
            self._accepted = True
            return read_reply(raw, self._rubric.criteria)
        except CallFailed as failed:
            raise trouble_of(failed) from None
        finally:  # also if the episode was cancelled: its connection is closed, and its place is free
            asking.seconds += time.monotonic() - sent
            self._gate.leave(started, used)

    def _body(self, asking: _Asking) -> dict[str, Any]:
        """Return the body of a request. After a malformed verdict the most probable one would be the same again."""
        judge = self._config
        body: dict[str, Any] = {
            "model": judge.model,
            "messages": asking.messages,
            "temperature": 0.7 if asking.malformed else 0.0,
            "max_tokens": judge.max_tokens,
        }
        if judge.response_format == "json_schema":
            schema = {"name": "verdict", "strict": True, "schema": self._rubric.schema()}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif judge.response_format == "json_object":
            body["response_format"] = {"type": "json_object"}
        return {name: value for name, value in (body | judge.request).items() if value is not None}

    def _hidden(self, trouble: Trouble) -> str:
        """Return the problem without the key, which an endpoint may repeat in its error."""
        return str(trouble).replace(self._key, "***") if self._key else str(trouble)


# ---- reading what an endpoint sent: a verdict, or the trouble with it. Pure
#
# body ──chat completion──> finish_reason, text ──JSON──> scores of exactly the criteria, each in its range
#              └──────────────────┴──────────────┴──────────> Trouble
# failed call ────────────────────────────────────────────────> Trouble


_SHOWN = 100  # characters of a reply in a message
_FENCED = re.compile(r"```(?:json)?[ \t]*\n((?:(?!```).)*)\n?[ \t]*```\Z", re.DOTALL)
#: statuses for a request that the same endpoint will refuse again
_REFUSED = (400, 413, 422)  # may be the completion's fault: it is too long
_NEVER = (401, 402, 403, 404, 405, 410)  # key, address or model
_BUSY = (408, 425, 429, 502, 503, 504)
_QUOTA = ("insufficient_quota", "exceeded your current quota")  # a 429 that no wait mends


class Trouble(Exception):
    """Why a request gave no verdict, in one line.

    cause    one of ``verifier_protocol.CAUSES``
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
class JudgeReply:
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


def read_reply(body: bytes, criteria: Sequence[Criterion]) -> JudgeReply:
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
        raise Trouble("the verdict was cut off (max_tokens of the judge)")
    if choice.finish_reason not in ("stop", None):
        raise Trouble(f"the verdict ended with finish_reason {_shown(choice.finish_reason)}")
    scores = _scores(choice.message.content or "", criteria)
    return JudgeReply(scores, read_tokens(body))


def _scores(text: str, criteria: Sequence[Criterion]) -> dict[str, float]:
    try:
        # without a thinking part before it, and without the fence around it
        said = text.strip()
        if said.startswith("<think>"):
            said = said.rpartition("</think>")[2].strip()
        fenced = _FENCED.search(said)
        verdict = _ANY.decode((fenced[1] if fenced else said).encode("utf-8", "replace"))
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


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return " ".join(text[: 2 * _SHOWN].split())[:_SHOWN] or "(empty)"


# ---- RateLimits: when the next request may start
#
# No I/O and no clock: time is an argument.
#
#     request ──wait_s: 0──> start ──> running ──> end
#                  │ more: paused, all slots taken, or a window is full
#                  └── ask again after that time, or when a request has ended
#
# Invariants:
#     concurrency   never more than ``concurrency`` requests are running
#     requests      at most ``requests`` of them start in any WINDOW_S seconds
#     tokens        their tokens are at most ``tokens`` in any WINDOW_S seconds, unless one used more than it reserved
#     no-standstill a request may start once nothing runs, the pause is over and the window is empty


WINDOW_S = 60.0


@dataclass(eq=False, slots=True)
class StartedRequest:
    """A request that has started. ``tokens``: reserved at first, used once it has ended."""

    time: float
    tokens: int


@dataclass(slots=True)
class RateLimits:
    """Limits on the requests of one process. 0 requests or tokens: no such limit."""

    concurrency: int
    requests: int = 0
    tokens: int = 0
    running: int = field(default=0, init=False)
    _starts: deque[StartedRequest] = field(
        default_factory=deque, init=False
    )  # requests of the last WINDOW_S, oldest first
    _paused_until: float = field(default=-math.inf, init=False)

    def wait_s(self, now: float, tokens: int) -> float:
        """Return the seconds until a request of ``tokens`` may start: 0 now, inf once a running one has ended."""
        if now < self._paused_until:
            return self._paused_until - now
        if self.running >= self.concurrency:
            return math.inf
        while self._starts and self._starts[0].time + WINDOW_S <= now:
            self._starts.popleft()
        free_at = max(self._request_free_at(), self._tokens_free_at(self._bounded(tokens)))
        return max(0.0, free_at - now)

    def start(self, now: float, tokens: int) -> StartedRequest:
        """Start a request for which ``wait_s`` is 0. Raises RuntimeError for any other."""
        if (wait_s := self.wait_s(now, tokens)) > 0:
            raise RuntimeError(f"a request started at {now}, {wait_s} s too early")
        started = StartedRequest(now, self._bounded(tokens))
        self._starts.append(started)
        self.running += 1
        return started

    def end(self, started: StartedRequest, used: int | None) -> None:
        """End a request. ``used``: its tokens; None: not known, so those that it reserved."""
        self.running -= 1
        if used is not None:
            started.tokens = used

    def pause(self, now: float, seconds: float) -> None:
        """Start nothing for ``seconds``: the endpoint is busy."""
        self._paused_until = max(self._paused_until, now + seconds)

    def _bounded(self, tokens: int) -> int:
        """Limit a reservation: a request that needs more than the whole window waits for an empty one."""
        return min(tokens, self.tokens) if self.tokens else tokens

    def _request_free_at(self) -> float:
        if not self.requests or len(self._starts) < self.requests:
            return -math.inf
        return self._starts[-self.requests].time + WINDOW_S

    def _tokens_free_at(self, tokens: int) -> float:
        """Return when enough tokens have left the window."""
        if not self.tokens:
            return -math.inf
        excess = sum(started.tokens for started in self._starts) + tokens - self.tokens
        free_at = -math.inf
        for started in self._starts:
            if excess <= 0:
                break
            excess -= started.tokens
            free_at = started.time + WINDOW_S
        return free_at


# ---- requests in their order


class RequestGate:
    """Queue before an endpoint, for one event loop."""

    def __init__(self, limits: RateLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.waiting = 0  # requests that have not started
        self._limits = limits
        self._clock = clock
        self._turn = asyncio.Lock()  # first come, first served: held by the request that starts next
        self._ended = asyncio.Event()

    async def enter(self, tokens: int) -> StartedRequest:
        """Wait until a request of ``tokens`` may start, and start it.

        The wait is bounded: running requests have a time limit, pauses a longest time, and windows end.
        """
        self.waiting += 1
        try:
            async with self._turn:
                while (wait_s := self._limits.wait_s(self._clock(), tokens)) > 0:
                    await self._wait(wait_s)
                return self._limits.start(self._clock(), tokens)
        finally:
            self.waiting -= 1

    async def _wait(self, seconds: float) -> None:
        """Wait until a request has ended, for at most ``seconds``."""
        self._ended.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                await self._ended.wait()

    def leave(self, started: StartedRequest, used: int | None) -> None:
        """End a request. ``used``: its tokens, None if not known."""
        self._limits.end(started, used)
        self._ended.set()

    def pause(self, seconds: float) -> None:
        """Let nothing start for ``seconds``."""
        self._limits.pause(self._clock(), seconds)
