"""Parts of replies that several dialects share: server-sent events, errors, usage, log-probs, HTTP statuses."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from realsys.errors import AgentError, DataError, GenerationError, RealsysError
from realsys.manager.client import RolloutSuperseded
from realsys.rollout.gateway.dialect import BadRequest, Choice, GatewayCall, GatewayReply

encode = msgspec.json.Encoder().encode
#: end of a stream of OpenAI's chat and text completions
DONE = b"data: [DONE]\n\n"
#: lowest log-prob that is written; JSON has no infinity
LOWEST = -9999.0

_OPENAI_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def data(value: object) -> bytes:
    """Return a server-sent event without a name."""
    return b"data: " + encode(value) + b"\n\n"


def event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event whose name is the type of ``value``."""
    return f"event: {value['type']}\ndata: ".encode() + encode(value) + b"\n\n"


def error_type(status: int) -> str:
    """Return the type of an error, as OpenAI and Anthropic name it."""
    return _OPENAI_ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")


def openai_error(status: int, message: str, field: str = "", code: str = "") -> dict[str, Any]:
    """Return an error in the form that OpenAI's SDK reads."""
    text = f"{field}: {message}" if field else message
    return {"error": {"message": text, "type": error_type(status), "param": field or None, "code": code or None}}


class OpenAIErrors:
    """The errors of the dialects whose clients are built on OpenAI's SDK."""

    def error(self, status: int, message: str, field: str = "", code: str = "") -> bytes:
        return encode(openai_error(status, message, field, code))

    def error_event(self, status: int, message: str) -> bytes:
        return data(openai_error(status, message))


def usage(reply: GatewayReply) -> dict[str, Any]:
    """Return OpenAI's counts of tokens."""
    prompt, completion = len(reply.prompt_tokens), reply.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def token_logprobs(call: GatewayCall, reply: GatewayReply, choice: Choice) -> list[dict[str, Any]]:
    """Return OpenAI's log-prob entry of each token: text, bytes, log-prob, most probable tokens."""
    completion = choice.completion
    tops: Sequence[list[tuple[int, float]]] = completion.top or ()

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {**_token(call, reply, token), "logprob": max(logprob, LOWEST)}

    entries = []
    for i, (token, logprob) in enumerate(zip(completion.tokens.tolist(), completion.logprobs.tolist(), strict=True)):
        top = tops[i][: call.top_logprobs] if i < len(tops) else ()
        entries.append(entry(token, logprob) | {"top_logprobs": [entry(other, value) for other, value in top]})
    return entries


def _token(call: GatewayCall, reply: GatewayReply, token: int) -> dict[str, Any]:
    """Return one token as the client wants it: as its id, or as its text and its bytes."""
    if call.tokens_as_ids or reply.vocabulary is None:
        return {"token": f"token_id:{token}", "bytes": None}
    raw = reply.vocabulary.token_bytes(token)
    return {"token": raw.decode("utf-8", "replace"), "bytes": list(raw)}


def token_fields(call: GatewayCall, choice: Choice) -> dict[str, Any]:
    """Return the fields of a choice that ``return_token_ids`` adds: ids and weight versions of the sampled tokens."""
    if not call.return_token_ids:
        return {}
    return {"token_ids": choice.completion.tokens.tolist(), "versions": choice.completion.versions.tolist()}


def stream_end(call: GatewayCall, reply: GatewayReply, chunk: dict[str, Any]) -> Iterator[bytes]:
    """Yield the end of a stream of OpenAI's completions: usage if ``include_usage``, then DONE."""
    if call.include_usage:
        yield data(chunk | {"choices": [], "usage": usage(reply)})
    yield DONE


# ---- errors of a call as HTTP statuses, chosen so that an SDK repeats a call only if this can help. Pure
#
# status        cause                                                 SDK
# 400 413 401   the request must change                               raises
# 410           the episode is over, or its attempt was superseded    raises
# 424           the engine failed although the call was repeated      raises
# 429 503       too many calls at a time; a server failed just now    retries
# 500           a defect of realsys                                   raises


log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
_URL = re.compile(r"https?://\S*[^\s:.,;]")  # agents must not know the address of an engine


@dataclass(frozen=True, slots=True)
class HttpProblem:
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


def over(cause: str) -> HttpProblem:
    """Return the refusal of a call of an episode that is over."""
    return HttpProblem(410, cause, code="episode_over")


def may_pass(error: BaseException) -> bool:
    """Return True if the client should send the same request again."""
    if isinstance(error, BadRequest):
        return error.status == 429
    return isinstance(error, GenerationError) and error.retryable


def problem_of(error: BaseException) -> HttpProblem:
    """Return the reply for an error of a call. A defect is logged with its traceback."""
    text = _URL.sub("a server", str(error))
    if isinstance(error, BadRequest):
        return HttpProblem(error.status, error.message, error.field, error.code, may_pass(error))
    if isinstance(error, DataError):
        return HttpProblem(400, text, "messages", "invalid_messages")
    if isinstance(error, RolloutSuperseded):
        return HttpProblem(410, text, code="attempt_superseded")
    if isinstance(error, AgentError):
        return over(text)
    if isinstance(error, GenerationError):
        retry = may_pass(error)
        return HttpProblem(503 if retry else 424, text, code="engine_failed", retry=retry)
    if not isinstance(error, RealsysError):
        log.error("a call of an agent failed", exc_info=error)
    return HttpProblem(500, f"{type(error).__name__}: {text}", code="internal_error")
