"""POST /v1/chat/completions of OpenAI, with the additions of vLLM (token ids)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from realsys.rollout.gateway import replies, request_fields
from realsys.rollout.gateway.dialect import BadRequest, Choice, GatewayCall, GatewayReply, ReplyHead, Sent
from realsys.rollout.gateway.request_fields import chat_messages, chat_tools, limits, read, tool_choice, top_logprobs


class ChatDialect(replies.OpenAIErrors):
    """OpenAI's chat completions."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> GatewayCall:
        request = read(body, request_fields.CHAT)
        call = limits(GatewayCall("chat", messages=chat_messages(request)), request)
        call.tools = chat_tools(request.get("tools", []))
        tool_choice(call, request.get("tool_choice"))
        call.logprobs = request.get("logprobs", False)
        call.top_logprobs = top_logprobs(request.get("top_logprobs", 0), "top_logprobs")
        if call.top_logprobs and not call.logprobs:
            raise BadRequest(400, "needs logprobs=true", "top_logprobs")
        call.options = dict(request.get("chat_template_kwargs", {}))
        if "reasoning_effort" in request.values:
            call.options.setdefault("reasoning_effort", request.get("reasoning_effort"))
        return call

    def reply(self, call: GatewayCall, reply: GatewayReply) -> bytes:
        body = _head(reply, "chat.completion") | {
            "choices": [_choice(call, reply, i, choice) for i, choice in enumerate(reply.choices)],
            "usage": replies.usage(reply),
        }
        if call.return_token_ids:
            body["prompt_token_ids"] = reply.prompt_tokens
        return replies.encode(body)

    def opening(self, call: GatewayCall, head: ReplyHead) -> bytes:
        chunk = _head(head, "chat.completion.chunk")
        return b"".join(
            replies.data(chunk | {"choices": [_delta(i, {"role": "assistant", "content": ""})]}) for i in range(call.n)
        )

    def part(self, call: GatewayCall, head: ReplyHead, index: int, sent: Sent, reasoning: str, text: str) -> bytes:
        sent.reasoning += reasoning
        sent.text += text
        chunk, deltas = _head(head, "chat.completion.chunk"), {"reasoning_content": reasoning, "content": text}
        return b"".join(
            replies.data(chunk | {"choices": [_delta(index, {name: delta})]}) for name, delta in deltas.items() if delta
        )

    def events(self, call: GatewayCall, reply: GatewayReply, sent: Sequence[Sent]) -> Iterator[bytes]:
        chunk = _head(reply, "chat.completion.chunk")
        for i, choice in enumerate(reply.choices):
            yield self.part(call, reply, i, sent[i], *sent[i].rest(choice))
            for k, tool_call in enumerate(choice.tool_calls):
                yield replies.data(chunk | {"choices": [_delta(i, {"tool_calls": [{"index": k} | tool_call]})]})
            # The last chunk has the ids and log-probs of all tokens: those of reasoning and tool calls have no text.
            end = _delta(i, {}, choice.finish_reason) | replies.token_fields(call, choice)
            if call.logprobs:
                end["logprobs"] = _logprobs(call, reply, choice)
            last = chunk | {"choices": [end]}
            if call.return_token_ids:
                last["prompt_token_ids"] = reply.prompt_tokens
            yield replies.data(last)
        yield from replies.stream_end(call, reply, chunk)


def _head(head: ReplyHead, kind: str) -> dict[str, Any]:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model}


def _choice(call: GatewayCall, reply: GatewayReply, index: int, choice: Choice) -> dict[str, Any]:
    message = choice.message() | {"refusal": None}
    if choice.tool_calls and not choice.text:
        message["content"] = None
    logprobs = _logprobs(call, reply, choice) if call.logprobs else None
    body = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}
    return body | replies.token_fields(call, choice)


def _logprobs(call: GatewayCall, reply: GatewayReply, choice: Choice) -> dict[str, Any]:
    return {"content": replies.token_logprobs(call, reply, choice), "refusal": None}


def _delta(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
