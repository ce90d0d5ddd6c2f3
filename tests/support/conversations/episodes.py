"""One conversation, turn by turn, with completions that the test names."""

from __future__ import annotations

from typing import Any

import numpy as np

from realsys.data.tokenizer import TextTokenizer
from realsys.generation.completion import Completion
from realsys.rollout.conversation import CompletionNode, Conversation, RequestPlan

USER = {"role": "user", "content": "one two"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None = "three", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str = "add", number: str = "c1", arguments: Any = '{"a": 1, "b": "x"}') -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, number: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": number, "content": text}


def generated(tokens: list[int], reason: str = "stop", version: int = 0) -> Completion:
    count = len(tokens)
    logprobs = -np.arange(1, count + 1, dtype=np.float32)
    return Completion(np.array(tokens, np.int32), logprobs, np.full(count, version, np.int32), reason)


class Turns:
    """A conversation whose replies are recorded and delivered."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.conversation = Conversation(tokenizer)

    def ended(self, text: str, version: int = 0) -> Completion:
        """Return a completion that ends with the tokenizer's stop token."""
        return generated([*self.tokenizer.encode_text(text), self.tokenizer.eos_token_id], version=version)

    def take(
        self, messages: list[dict[str, Any]], reply: dict[str, Any] | None = None, *, deliver: bool = True, **more: Any
    ) -> tuple[RequestPlan, CompletionNode]:
        """Plan a request and record a reply to it. ``completion``, ``tools``, ``options`` may be given."""
        reply = reply or assistant()
        completion = more.pop("completion", None) or self.ended(reply["content"] or "call")
        plan = self.conversation.plan(messages, **more)
        node = self.conversation.record(plan, completion, reply)
        if deliver:
            self.conversation.deliver(node)
        return plan, node

    def shown(self, plan: RequestPlan) -> str:
        return self.tokenizer.decode(plan.tokens)
