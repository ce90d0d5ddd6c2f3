"""POST /tokenize of vLLM and GET /v1/models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from realsys.rollout.gateway import replies, request_fields
from realsys.rollout.gateway.dialect import BadRequest, GatewayCall
from realsys.rollout.gateway.request_fields import chat_messages, chat_tools, limits, read


class TokenizeDialect(replies.OpenAIErrors):
    """Tokens of a text or of a chat, as a completion would get them."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> GatewayCall:
        request = read(body, request_fields.TOKENIZE)
        if ("prompt" in request.values) == ("messages" in request.values):
            raise BadRequest(400, "give either prompt or messages", "prompt")
        if "prompt" in request.values:
            call = GatewayCall("text", text=request.get("prompt"))
        else:
            call = GatewayCall("chat", messages=chat_messages(request))
        call.tools = chat_tools(request.get("tools", []))
        call.options = dict(request.get("chat_template_kwargs", {}))
        return limits(call, request)

    def reply(self, tokens: Sequence[int], max_model_len: int) -> bytes:
        """Return the reply for these tokens."""
        body = {"count": len(tokens), "max_model_len": max_model_len, "tokens": list(tokens), "token_strs": None}
        return replies.encode(body)


def models(names: Sequence[str], created: int, max_model_len: int) -> bytes:
    """Return the reply of GET /v1/models. ``max_model_len``: tokens of prompt and completion together."""
    cards = [_card(name, created, max_model_len) for name in names]
    return replies.encode({"object": "list", "data": cards})


def model(name: str, created: int, max_model_len: int) -> bytes:
    """Return the reply of GET /v1/models/NAME."""
    return replies.encode(_card(name, created, max_model_len))


def _card(name: str, created: int, max_model_len: int) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "realsys",
        "root": name,
        "parent": None,
        "max_model_len": max_model_len,
    }
