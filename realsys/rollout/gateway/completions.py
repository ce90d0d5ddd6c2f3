"""POST /v1/completions of OpenAI, with the additions of vLLM (token ids in and out)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from realsys.rollout.gateway import replies, request_fields
from realsys.rollout.gateway.dialect import BadRequest, Choice, GatewayCall, GatewayReply, ReplyHead, Sent
from realsys.rollout.gateway.request_fields import check, limits, read, top_logprobs

#: limit of a completion if the client sets none, as OpenAI defines it for this route only
MAX_TOKENS = 16


class CompletionsDialect(replies.OpenAIErrors):
    """OpenAI's text completions. One request has one prompt."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> GatewayCall:
        request = read(body, request_fields.COMPLETIONS)
        call = limits(_prompt(request.get("prompt")), request)
        if call.max_tokens is None:
            call.max_tokens = MAX_TOKENS
        call.logprobs = "logprobs" in request.values
        call.top_logprobs = top_logprobs(request.get("logprobs", 0), "logprobs")
        return call

    def reply(self, call: GatewayCall, reply: GatewayReply) -> bytes:
        choices = [_choice(call, reply, i, choice) for i, choice in enumerate(reply.choices)]
        if call.return_token_ids:
            for choice in choices:
                choice["prompt_token_ids"] = reply.prompt_tokens
        return replies.encode(_head(reply) | {"choices": choices, "usage": replies.usage(reply)})

    def opening(self, call: GatewayCall, head: ReplyHead) -> bytes:
        chunk = _head(head)
        return b"".join(
            replies.data(chunk | {"choices": [{"index": i, "text": "", "logprobs": None, "finish_reason": None}]})
            for i in range(call.n)
        )

    def part(self, call: GatewayCall, head: ReplyHead, index: int, sent: Sent, reasoning: str, text: str) -> bytes:
        sent.text += text
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        return replies.data(_head(head) | {"choices": [choice]})

    def events(self, call: GatewayCall, reply: GatewayReply, sent: Sequence[Sent]) -> Iterator[bytes]:
        chunk = _head(reply)
        for i, choice in enumerate(reply.choices):
            # The last chunk has the ids and log-probs of all tokens.
            last = _choice(call, reply, i, choice) | {"text": sent[i].rest(choice)[1]}
            if call.return_token_ids:
                last["prompt_token_ids"] = reply.prompt_tokens
            yield replies.data(chunk | {"choices": [last]})
        yield from replies.stream_end(call, reply, chunk)


def _prompt(prompt: Any) -> GatewayCall:
    if isinstance(prompt, str):
        return GatewayCall("text", text=prompt)
    if prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise BadRequest(400, f"must be one prompt, not {len(prompt)}: send a request for each", "prompt")
        return _prompt(prompt[0])
    if not prompt:
        raise BadRequest(400, "must not be empty", "prompt")
    return GatewayCall("tokens", token_ids=check(prompt, request_fields.TOKENS, "prompt"), token_field="prompt")


def _head(head: ReplyHead) -> dict[str, Any]:
    return {"id": head.id, "object": "text_completion", "created": head.created, "model": head.model}


def _choice(call: GatewayCall, reply: GatewayReply, index: int, choice: Choice) -> dict[str, Any]:
    # This route knows no tool calls: they stay in the text, so that the end is "stop".
    end = "length" if choice.finish_reason == "length" else "stop"
    logprobs = _logprobs(call, reply, choice) if call.logprobs else None
    body = {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": end}
    return body | replies.token_fields(call, choice)


def _logprobs(call: GatewayCall, reply: GatewayReply, choice: Choice) -> dict[str, Any]:
    """Return the older form of log-probs: parallel lists over the tokens."""
    entries = replies.token_logprobs(call, reply, choice)
    offsets, position = [], 0
    for entry in entries:
        offsets.append(position)
        position += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries],
        "text_offset": offsets,
    }
