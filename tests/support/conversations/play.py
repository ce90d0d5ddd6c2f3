"""Completion conversations: an agent with random habits, and an engine that returns random tokens.

The engine knows nothing of conversations. It notes what it was sent and what it returned; each sampled token has a
log-prob of its own, which identifies it in the rows.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from realsys.data.tokenizer import TextTokenizer
from realsys.errors import DataError
from realsys.generation.completion import Completion
from realsys.rollout.conversation import CompletionNode, Conversation, RequestPlan
from realsys.types import Row

WORDS = (
    "one",
    "two",
    "three",
    "four",
    "fox",
    "sun",
    "<|im_end|>",
    "12",
    "x=3;",
    "`code`",
    "{a}",
    "naïve\n\n",
    "",
    "end",
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "first"}}},
        },
    }
    for name in ("add", "look")
]


@dataclass
class Sampled:
    """One call of the engine."""

    sent: list[int]
    completion: Completion
    node: CompletionNode
    delivered: bool = False


@dataclass
class Played:
    """A finished conversation. ``linear``: its history only grew, so it must be one row."""

    conversation: Conversation
    calls: list[Sampled] = field(default_factory=list)
    linear: bool = True
    refused: int = 0  # requests that the template refuses
    odd_tails: list[str] = field(default_factory=list)  # not what the template ends the whole conversation with
    odd_calls: int = 0  # the same, after a reply with content and calls


class Player:
    """Agent and engine of one generated conversation."""

    def __init__(self, tokenizer: TextTokenizer, random: Random) -> None:
        self.random = random
        self.tokenizer = tokenizer
        self.played = Played(Conversation(tokenizer))
        self.messages: list[dict[str, Any]] = []
        self.tools = TOOLS if random.random() < 0.4 else []
        self.options: dict[str, Any] = random.choice([{}, {}, {"enable_thinking": True}, {"enable_thinking": False}])
        self._serial = 0

    def play(self) -> Played:
        """Play all turns. A request that the template refuses ends the conversation."""
        if self.random.random() < 0.4:
            self.messages.append({"role": "system", "content": self.content()})
        self.messages.append({"role": "user", "content": self.content()})
        turns = self.random.choice([1, 2, 2, 3, 3, 4]) if self.random.random() < 0.98 else self.random.randint(8, 14)
        for _ in range(turns):
            try:
                reply = self.turn()
            except DataError:
                self.played.refused += 1
                break
            self.next_messages(reply)
            if self.random.random() < 0.1:
                self.rewrite()
        return self.played

    def turn(self) -> dict[str, Any]:
        """Ask once, with retries whose replies are lost; return the reply that the agent kept."""
        while self.random.random() < 0.08:
            self.ask(delivered=False)
        if self.random.random() < 0.05:  # the agent samples the turn twice and goes on with the second reply
            self.ask(delivered=True)
            self.played.linear = False
        return self.ask(delivered=True)

    def ask(self, *, delivered: bool) -> dict[str, Any]:
        """Send the conversation, sample a completion and read it as a random reply."""
        plan = self.played.conversation.plan(self.messages, self.tools, self.options)
        self.compare_tail(plan)
        completion = self.sample()
        reply = self.reply(completion)
        node = self.played.conversation.record(plan, completion, reply)
        if delivered:
            self.played.conversation.deliver(node)
        self.played.calls.append(Sampled(plan.tokens, completion, node, delivered))
        return reply

    def compare_tail(self, plan: RequestPlan) -> None:
        """Compare the tail with the end of the whole conversation, as the template renders it."""
        if plan.parent.parent is None or plan.segment is None:
            return  # nothing recorded is extended
        reply = self.messages[len(self.messages) - len(plan.segment) - 1]
        whole = self.tokenizer.encode_chat(self.messages, self.tools, self.options)
        tail = self.tokenizer.decode(plan.context)
        if self.tokenizer.decode(whole[-2 * len(plan.context) - 8 :]).endswith(tail):
            return
        if reply.get("tool_calls") and reply.get("content"):
            self.played.odd_calls += 1
        else:
            self.played.odd_tails.append(tail)

    def sample(self) -> Completion:
        """Return random tokens: some end with a stop token, some are cut off, some hold special tokens."""
        count = self.random.randint(0 if self.random.random() < 0.02 else 1, 8)
        tokens = [self.random.randrange(self.tokenizer.vocab_size) for _ in range(count)]
        ended = self.random.random() < 0.8
        if ended:
            tokens.append(self.random.choice(self.tokenizer.eos_token_ids))
        serials = np.arange(self._serial, self._serial + len(tokens), dtype=np.float32)
        self._serial += len(tokens)
        number = np.full(len(tokens), len(self.played.calls), np.int32)
        reason = "stop" if ended else "length"
        return Completion(np.array(tokens, np.int32), -serials, number, reason)

    def reply(self, completion: Completion) -> dict[str, Any]:
        """Return the message that a parser might have read in the completion."""
        unique = "" if self.random.random() < 0.3 else f" {self.content()} {self._serial}"  # equal replies occur too
        reply: dict[str, Any] = {"role": "assistant", "content": f"the sum is 12{unique}"}
        if self.random.random() < 0.3:
            reply["reasoning_content"] = self.content()
        if self.tools and self.random.random() < 0.6:
            reply["tool_calls"] = [self.call(number) for number in range(self.random.choice([1, 1, 2]))]
            if self.random.random() < 0.5:
                reply["content"] = None
        return reply

    def call(self, number: int) -> dict[str, Any]:
        arguments = {"a": self.random.randrange(100), "b": self.content()}
        function = {"name": self.random.choice(TOOLS)["function"]["name"], "arguments": json.dumps(arguments)}
        return {"id": f"call_{self._serial}_{number}", "type": "function", "function": function}

    def next_messages(self, reply: dict[str, Any]) -> None:
        """Append the reply as an agent sends it back, and the agent's next messages."""
        self.messages.append(self.echo(reply))
        for call in reply.get("tool_calls") or ():
            name = {"name": call["function"]["name"]} if self.random.random() < 0.5 else {}
            result = {"role": "tool", "tool_call_id": call["id"], "content": self.content(), **name}
            self.messages.append(result)
        if not reply.get("tool_calls") or self.random.random() < 0.1:
            self.messages.append({"role": "user", "content": self.content()})

    def echo(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Return the reply after the types of an agent: keys added, dropped, and written in another way."""
        message = json.loads(json.dumps(reply))
        if self.random.random() < 0.5:
            message.pop("reasoning_content", None)
        if self.random.random() < 0.3:
            message |= {"refusal": None, "annotations": [], "audio": None}
        if message["content"] is None and self.random.random() < 0.5:
            message["content"] = ""
        elif message["content"] is not None and self.random.random() < 0.2:
            message["content"] = [{"type": "text", "text": message["content"]}]
        for call in message.get("tool_calls", ()):
            if self.random.random() < 0.3:
                arguments = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
        return message

    def rewrite(self) -> None:
        """Change the history half way, as an agent that summarises, forgets or edits."""
        place = self.random.randrange(len(self.messages))
        if self.random.random() < 0.3 and len(self.messages) > 3:
            last = max(index for index, message in enumerate(self.messages) if message["role"] == "user")
            del self.messages[1 : max(last, 1)]  # forget the middle
            self.messages[0] = {"role": "user", "content": self.content()}
            del self.messages[1:]
        elif self.messages[place]["role"] in ("user", "system"):
            self.messages[place]["content"] = f"{self.content()} rewritten {self._serial}"
        else:
            return
        self.played.linear = False

    def content(self) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.randint(1, 6)))


def mismatches(played: Played) -> list[str]:
    """Compare rows with what the engine was sent and returned, token by token; empty if all agree."""
    rows, problems = played.conversation.rows(), []
    drift = played.conversation.drift
    kept = [call for call in played.calls if call.node.delivered]
    for call in played.calls:
        if call.delivered and not call.node.delivered:
            problems.append("a delivered completion is not marked so")
    trained = Counter(float(value) for row in rows for value in row.logprobs)
    returned = Counter(float(value) for call in kept for value in call.completion.logprobs)
    if trained != returned:
        problems.append("not every returned token is trained once")
    for row in rows:
        problems += row_problems(row, played.calls)
    if drift.total() != len(kept):
        problems.append(f"{drift.total()} completions are counted, {len(kept)} were delivered")
    if kept and len(rows) != 1 + drift["branch"]:
        problems.append(f"{len(rows)} rows with {drift['branch']} branches")
    return problems


def script(kind: str, turn: int) -> list[dict[str, Any]]:
    """Return a reply without thinking, and the messages after it. ``kind``: text, call, or calls."""
    reply: dict[str, Any] = {"role": "assistant", "content": f"one two {turn}" if kind == "text" else None}
    if kind == "text":
        return [reply, {"role": "user", "content": "three fox"}]
    names = [f"call_{turn}_{number}" for number in range(2 if kind == "calls" else 1)]
    function = {"name": "add", "arguments": '{"a": "two"}'}
    reply["tool_calls"] = [{"id": name, "type": "function", "function": function} for name in names]
    return [reply, *({"role": "tool", "tool_call_id": name, "content": "ten"} for name in names)]


def follow_template(tokenizer: TextTokenizer, kind: str) -> str:
    """Play an engine that samples exactly what the template prints, and compare with the template at each turn.

    Returns "equal", "different", or why there is nothing to compare: "refused" by the template, or "rewrites" if the
    template prints earlier turns in another way later on.
    """
    conversation, tools = Conversation(tokenizer), TOOLS if kind != "text" else []
    messages: list[dict[str, Any]] = [{"role": "user", "content": "count one two"}]
    plan = conversation.plan(messages, tools)
    for turn in range(4):
        reply, *after = script(kind, turn)
        messages += [reply, *after]
        try:
            whole = tokenizer.encode_chat(messages, tools)
        except DataError:
            return "refused"
        if whole[: len(plan.tokens)] != plan.tokens:
            return "rewrites"
        rest = whole[len(plan.tokens) :]
        end = next((at for at, token in enumerate(rest) if token in tokenizer.eos_token_ids), len(rest))
        sampled = rest[: end + 1]
        zeros = np.zeros(len(sampled))
        completion = Completion(np.array(sampled, np.int32), zeros.astype(np.float32), zeros.astype(np.int32), "stop")
        conversation.deliver(conversation.record(plan, completion, reply))
        plan = conversation.plan(messages, tools)
        if plan.tokens != whole or plan.drift != "clean":
            return "different"
    return "equal"


def row_problems(row: Row, calls: list[Sampled]) -> list[str]:
    """Each trained run must follow exactly the tokens that the engine was sent for it."""
    problems, positions, done = [], np.flatnonzero(row.loss_mask), 0
    while done < len(positions):
        call = calls[int(row.versions[done])]
        begin, tokens = int(positions[done]), call.completion.tokens
        end = begin + len(tokens)
        if begin != len(call.sent) or row.tokens[:begin].tolist() != call.sent:
            problems.append("the context of a completion is not what the engine was sent")
        if row.tokens[begin:end].tolist() != tokens.tolist() or not row.loss_mask[begin:end].all():
            problems.append("trained tokens are not what the engine returned")
        if row.logprobs[done : done + len(tokens)].tolist() != call.completion.logprobs.tolist():
            problems.append("log-probs are not what the engine returned")
        done += len(tokens)
    if len(row.logprobs) != len(positions):
        problems.append("mask and log-probs have different lengths")
    return problems
