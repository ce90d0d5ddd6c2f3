"""Requests that real clients sent, and the replies that they read (``golden``, one file per client)."""

import dataclasses
import json
from itertools import pairwise

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from realsys.rollout.conversation import forms
from realsys.rollout.gateway.capture import Echoes
from realsys.rollout.gateway.dialect import GatewayCall
from tests.support.gateway.replies import DIALECTS, GOLDEN, choice, golden_calls

CALLS = golden_calls()
TYPES = {"/v1/chat/completions": ChatCompletion, "/v1/responses": Response, "/v1/completions": Completion}


def dialect_of(call):
    return DIALECTS[call["path"].partition("?")[0]]


def read(call):
    return dialect_of(call).parse(json.dumps(call["body"]).encode(), call["headers"])


def message_of(call):
    """Return the assistant message of a golden reply in chat form, from the fields that a client reads."""
    reply = call["reply"] if isinstance(call["reply"], dict) else end_of(call["reply"])
    if call["path"].startswith("/v1/chat"):
        return reply["choices"][0]["message"]
    if call["path"].startswith("/v1/messages"):
        text = "".join(block["text"] for block in reply["content"] if block["type"] == "text")
        used = [block for block in reply["content"] if block["type"] == "tool_use"]
        calls = [(block["id"], block["name"], json.dumps(block["input"])) for block in used]
    else:
        text = "".join(item["content"][0]["text"] for item in reply["output"] if item["type"] == "message")
        used = [item for item in reply["output"] if item["type"] == "function_call"]
        calls = [(item["call_id"], item["name"], item["arguments"]) for item in used]
    functions = [{"id": a, "type": "function", "function": {"name": b, "arguments": c}} for a, b, c in calls]
    return {"role": "assistant", "content": text} | ({"tool_calls": functions} if functions else {})


def end_of(stream):
    """Return the reply that the events of a stream make up."""
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    if events[-1].get("type") == "response.completed":
        return events[-1]["response"]
    if events[0].get("type") == "message_start":
        texts = [event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"]
        return {"content": [{"type": "text", "text": "".join(texts)}]}
    message = {"role": "assistant", "content": "", "tool_calls": []}
    for delta in (each["delta"] for event in events for each in event["choices"]):
        message["content"] += delta.get("content") or ""
        message["tool_calls"] += delta.get("tool_calls", [])
    return {"choices": [{"message": message}]}


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[name for name, _ in CALLS])
def test_golden_request_becomes_its_call(name, call):
    body = call["body"]
    expected = {
        key: body.get("prompt", body.get("token_ids")) if key == "token_ids" and value == "as in the body" else value
        for key, value in call["call"].items()
    }
    expected |= {key: body[key] for key in ("messages", "tools") if expected.get(key) == "as in the body"}
    found, default = dataclasses.asdict(read(call)), dataclasses.asdict(GatewayCall("chat"))
    found = {key: value for key, value in found.items() if key == "kind" or value != default[key]}
    assert json.loads(json.dumps(found)) == expected


@pytest.mark.parametrize(("name", "call"), [one for one in CALLS if isinstance(one[1].get("reply"), dict)])
def test_golden_reply_fits_sdk_types(name, call):
    if (kind := TYPES.get(call["path"])) is not None:
        assert kind.model_validate(call["reply"], strict=False).model_dump(exclude_unset=True)


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.json")), ids=lambda file: file.stem)
def test_next_request_extends_what_was_returned(file):
    """The next request begins, in canonical form, with the earlier one and the message that was returned."""
    golden = json.loads(file.read_text("utf-8"))
    echoes, compared = Echoes(), 0
    for before, after in pairwise(golden["calls"]):
        earlier, later = read(before), read(after)
        if "reply" not in before or earlier.kind != "chat" or len(later.messages) < 3:
            continue
        returned = message_of(before)
        stop = "</code>" if file.stem == "smolagents_code" else None  # the string that ended this completion
        echoes.remember(choice(returned["content"] or "", None, *returned.get("tool_calls", []), stop=stop))
        history = forms([*echoes.restore(earlier.messages), returned])
        assert forms(echoes.restore(later.messages))[: len(history)] == history
        compared += 1
    alone = ("litellm", "openai_completions", "prime_rl", "verifiers_train")  # single calls, or token ids
    assert compared or file.stem in alone


def test_all_clients_have_golden_files():
    clients = {json.loads(file.read_text("utf-8"))["client"] for file in GOLDEN.glob("*.json")}
    needed = {"openai", "anthropic", "openai-agents", "smolagents", "langgraph", "mini-swe-agent", "litellm"}
    assert clients == needed | {"verifiers", "prime-rl"}
