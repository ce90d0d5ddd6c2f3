"""Parts of replies that several dialects share: server-sent events, errors, usage, log-probs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from realsys.rollout.gateway.wire.base import Call, Choice, Reply

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


def usage(reply: Reply) -> dict[str, Any]:
    """Return OpenAI's counts of tokens."""
    prompt, completion = len(reply.prompt_tokens), reply.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def token_logprobs(call: Call, reply: Reply, choice: Choice) -> list[dict[str, Any]]:
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


def _token(call: Call, reply: Reply, token: int) -> dict[str, Any]:
    """Return one token as the client wants it: as its id, or as its text and its bytes."""
    if call.tokens_as_ids or reply.vocabulary is None:
        return {"token": f"token_id:{token}", "bytes": None}
    raw = reply.vocabulary.token_bytes(token)
    return {"token": raw.decode("utf-8", "replace"), "bytes": list(raw)}


def token_fields(call: Call, choice: Choice) -> dict[str, Any]:
    """Return the fields of a choice that ``return_token_ids`` adds: ids and weight versions of the sampled tokens."""
    if not call.return_token_ids:
        return {}
    return {"token_ids": choice.completion.tokens.tolist(), "versions": choice.completion.versions.tolist()}


def stream_end(call: Call, reply: Reply, chunk: dict[str, Any]) -> Iterator[bytes]:
    """Yield the end of a stream of OpenAI's completions: usage if ``include_usage``, then DONE."""
    if call.include_usage:
        yield data(chunk | {"choices": [], "usage": usage(reply)})
    yield DONE
