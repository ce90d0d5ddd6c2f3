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

import logging
import os
import time
from dataclasses import dataclass
from typing import Any

from realsys.cluster.http_client import CallFailed, HttpClient
from realsys.config.schema import Config
from realsys.errors import NoVerifierError, RealsysError, RewardError, StuckError
from realsys.reward.failure_tally import FailureTally
from realsys.reward.frames import ENDPOINT, NO_VERDICT, RAISED
from realsys.reward.judge.gate import Gate
from realsys.reward.judge.judge_checks import check_judge
from realsys.reward.judge.judge_replies import Reply, Trouble, read_reply, read_tokens, trouble_of
from realsys.reward.judge.rate_limits import RateLimits
from realsys.reward.judge.rubric import Rubric, RubricError
from realsys.reward.verifiers.base import Item, Verdict

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


class LlmJudge:
    """Judge of one process, for one event loop. It has its share of the limits: 1 of ``sharers``."""

    @staticmethod
    def check(config: Config) -> None:
        """Check the settings before anything starts. Raises ConfigError."""
        check_judge(config)

    def __init__(self, config: Config, sharers: int = 1, *, first_delay_s: float = FIRST_DELAY_S) -> None:
        """Read settings and key. Raises ConfigError."""
        check_judge(config)
        judge = config.rollout.reward.judge
        self._config = judge
        self._ends = config.rollout.reward.wrong, config.rollout.reward.correct
        self._rubric = Rubric(judge)
        self._url = judge.base_url.rstrip("/") + "/chat/completions"
        self._key = os.environ[judge.api_key_env].strip() if judge.api_key_env else ""
        self._client = HttpClient(key=self._key, max_reply=_MAX_REPLY)
        limits = (judge.concurrency, judge.requests_per_minute, judge.tokens_per_minute)
        concurrency, requests, tokens = (limit // sharers for limit in limits)
        self._gate = Gate(RateLimits(concurrency, requests, tokens))
        self._first_delay_s = first_delay_s
        self._tally = FailureTally()
        self._accepted = False  # the endpoint has answered a request: a refusal is then the completion's fault
        self._refused: StuckError | None = None  # the endpoint will refuse every request: none is sent any more
        self._troubles = 0
        self._closed = False

    @property
    def waiting(self) -> int:
        """Number of items whose request has not started."""
        return self._gate.waiting

    @property
    def undecided(self) -> int:
        return self._tally.undecided

    def take_failures(self) -> dict[str, int]:
        """Return the items without a verdict since the last call, by cause."""
        return self._tally.take()

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
        self._tally.decide()
        return self._verdict(reply, asking)

    async def close(self) -> None:
        """Close the connections; requests under way fail."""
        self._closed = True
        await self._client.close()

    def _failed(self, error: RewardError) -> RealsysError:
        self._tally.undecided += 1
        return self._tally.fail(error) or error

    def _verdict(self, reply: Reply, asking: _Asking) -> Verdict:
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

    async def _ask(self, asking: _Asking) -> Reply:
        """Ask until there is a verdict. Raises RewardError or StuckError after trouble that no request can mend."""
        while True:
            try:
                return await self._request(asking)
            except Trouble as trouble:
                self._log(trouble)
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
            self._refused = StuckError(f"{described}: correct rollout.reward.judge, or the endpoint")
            return self._refused
        return RewardError(described, trouble.cause) if is_over else None

    def _pause_s(self, trouble: Trouble, asking: _Asking) -> float:
        if trouble.wait_s:
            return min(trouble.wait_s, self._config.outage_s)
        pause_s, asking.delay_s = asking.delay_s, min(2 * asking.delay_s, LAST_DELAY_S)
        return pause_s

    async def _request(self, asking: _Asking) -> Reply:
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

    def _log(self, trouble: Trouble) -> None:
        self._troubles += 1
        if self._troubles <= _LOGGED:
            log.warning("judge: %s", self._hidden(trouble))
