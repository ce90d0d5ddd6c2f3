"""Errors of a call as HTTP statuses, chosen so that an SDK repeats a call only if this can help. Pure.

status        cause                                                 SDK
400 413 401   the request must change                               raises
410           the episode is over, or its attempt was superseded    raises
424           the engine failed although the call was repeated      raises
429 503       too many calls at a time; a server failed just now    retries
500           a defect of realsys                                   raises
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from realsys.errors import AgentError, DataError, GenerationError, RealsysError
from realsys.manager.client import RolloutSuperseded
from realsys.rollout.gateway.wire.base import BadRequest

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
_URL = re.compile(r"https?://\S*[^\s:.,;]")  # agents must not know the address of an engine


@dataclass(frozen=True, slots=True)
class Problem:
    """An error reply. ``code``: machine-readable cause; ``retry``: the same request may succeed."""

    status: int
    message: str
    field: str = ""
    code: str = ""
    retry: bool = False

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers by which SDKs decide about a retry."""
        headers = [(b"x-should-retry", b"true" if self.retry else b"false")]
        if self.retry:
            headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
        return headers


def over(cause: str) -> Problem:
    """Return the refusal of a call of an episode that is over."""
    return Problem(410, cause, code="episode_over")


def may_pass(error: BaseException) -> bool:
    """Return True if the client should send the same request again."""
    if isinstance(error, BadRequest):
        return error.status == 429
    return isinstance(error, GenerationError) and error.retryable


def problem_of(error: BaseException) -> Problem:
    """Return the reply for an error of a call. A defect is logged with its traceback."""
    text = _URL.sub("a server", str(error))
    if isinstance(error, BadRequest):
        return Problem(error.status, error.message, error.field, error.code, may_pass(error))
    if isinstance(error, DataError):
        return Problem(400, text, "messages", "invalid_messages")
    if isinstance(error, RolloutSuperseded):
        return Problem(410, text, code="attempt_superseded")
    if isinstance(error, AgentError):
        return over(text)
    if isinstance(error, GenerationError):
        retry = may_pass(error)
        return Problem(503 if retry else 424, text, code="engine_failed", retry=retry)
    if not isinstance(error, RealsysError):
        log.error("a call of an agent failed", exc_info=error)
    return Problem(500, f"{type(error).__name__}: {text}", code="internal_error")
