"""POST /inference/v1/generate of vLLM: token ids in, token ids and log-probs out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from realsys.rollout.gateway import replies, request_fields
from realsys.rollout.gateway.dialect import BadRequest, Choice, GatewayCall, GatewayReply, ReplyHead, Sent
from realsys.rollout.gateway.request_fields import Body, limits, read, top_logprobs

#: header with the client's name of the episode
SESSION_HEADER = "x-session-id"


class GenerateDialect(replies.OpenAIErrors):
    """vLLM's route for clients that tokenise themselves. The reply always has the ids of the sampled tokens."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> GatewayCall:
        request = read(body, request_fields.GENERATE)
        settings = Body(request.get("sampling_params", {}), request_fields.GENERATE_SAMPLING, "sampling_params.")
        if not request.get("token_ids"):
            raise BadRequest(400, "must not be empty", "token_ids")
        settings.values |= {name: value for name, value in request.values.items() if name != "stop"}
        settings.ignored += request.ignored
        call = limits(GatewayCall("tokens", token_ids=request.get("token_ids")), settings)
        call.logprobs = "logprobs" in settings.values
        # The clients of this route always send 1, and read the log-prob of the sampled token only.
        most = top_logprobs(settings.get("logprobs", 0), "sampling_params.logprobs")
        call.top_logprobs = most if most > 1 else 0
        call.tokens_as_ids = True
        return call

    def reply(self, call: GatewayCall, reply: GatewayReply) -> bytes:
        body = _head(call, reply) | {
            "choices": [_choice(call, reply, i, choice) for i, choice in enumerate(reply.choices)],
            "prompt_logprobs": None,
            "kv_transfer_params": None,
            "usage": replies.usage(reply),
        }
        return replies.encode(body)

    def opening(self, call: GatewayCall, head: ReplyHead) -> bytes:
        return b""  # clients expect token ids in every event

    def part(self, call: GatewayCall, head: ReplyHead, index: int, sent: Sent, reasoning: str, text: str) -> bytes:
        return b""

    def events(self, call: GatewayCall, reply: GatewayReply, sent: Sequence[Sent]) -> Iterator[bytes]:
        chunk = _head(call, reply)
        for i, choice in enumerate(reply.choices):
            yield replies.data(chunk | {"choices": [_choice(call, reply, i, choice)]})
        yield from replies.stream_end(call, reply, chunk)


def _head(call: GatewayCall, reply: GatewayReply) -> dict[str, Any]:
    head: dict[str, Any] = {"request_id": reply.id, "model": reply.model}
    if call.return_token_ids:
        head["prompt_token_ids"] = reply.prompt_tokens
    return head


def _choice(call: GatewayCall, reply: GatewayReply, index: int, choice: Choice) -> dict[str, Any]:
    return {
        "index": index,
        "token_ids": choice.completion.tokens.tolist(),
        "versions": choice.completion.versions.tolist(),
        "logprobs": {"content": replies.token_logprobs(call, reply, choice)} if call.logprobs else None,
        "finish_reason": "length" if choice.finish_reason == "length" else "stop",
    }
