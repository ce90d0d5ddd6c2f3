"""Token identity of an agent that speaks messages or text: its requests become rows of recorded tokens.

    plan(messages) ──Plan.tokens──> engine ──Generated──> record() ──Node──> reply to the agent ──> deliver()
                                                                                   rows() ──> one Row per leaf

A request extends the longest recorded conversation that it begins with. Only the tail after that is tokenised, so
sampled tokens stay as they were. ``drift`` counts how each completion was joined:

    first              nothing was recorded before
    clean              the completion before it ended with the template's own stop token
    boundary_inserted  it did not (cut off, stop string, another stop token): the tail inserts the end of its turn
    branch             the request rewrote its history, or repeats a turn: a further row
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from realsys.data.chat import NO_OPTIONS
from realsys.data.tokenizer import TextTokenizer, Tools
from realsys.errors import DataError
from realsys.generation.client import Generated
from realsys.rollout.conversation.messages import form_of, forms, key_of
from realsys.rollout.conversation.tree import Drift, Node, Segment, drift_of, find_tokens, rows_of
from realsys.types import Row

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Plan:
    """The input of one call of the engine.

    tokens   all tokens before the completion
    drift    how they join the recorded tokens
    parent   the node that they extend, ``context`` the tokens after it
    segment  canonical forms of the messages after ``parent``; None if the request had no messages
    text     text after the one that was returned for ``parent``, in a request for the completion of a text
    """

    tokens: list[int]
    drift: Drift
    parent: Node
    context: list[int]
    segment: Segment | None = None
    text: str | None = None


class Conversation:
    """All that one episode sampled. No I/O: the caller calls the engine between ``plan`` and ``record``."""

    def __init__(self, tokenizer: TextTokenizer, chat: bool = True) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._roots: dict[bytes, Node] = {}
        self._latest: Plan | None = None  # plan of the node recorded last, which the next request usually extends
        self._latest_node: Node | None = None

    @property
    def drift(self) -> Counter[str]:
        """Number of delivered completions by the way they were joined. ``rows`` has one row more than branches."""
        return drift_of(list(self._roots.values()))

    def plan(self, messages: Messages, tools: Tools = (), options: Mapping[str, Any] = NO_OPTIONS) -> Plan:
        """Plan the completion of a chat. ``options``: variables of the template (chat_template_kwargs).

        Tools and options are in the tokens of the first turn, so others begin another row. Raises DataError.
        """
        if not self._chat:
            raise DataError("data.chat_template is false, so messages cannot be shown to the model: send text")
        if not messages:
            raise DataError("messages must not be empty")
        segment = tuple(forms(messages))
        root = self._root(key_of(tools, options))
        node, size, _ = root.find_messages(segment)
        if node is root:
            context = self._tokenizer.encode_chat(messages, tools, options)
            return self._begin(root, context, segment)
        node.deliver()
        before, reply, after = messages[: size - 1], messages[size - 1], messages[size:]
        try:
            tail, clean = self._tokenizer.encode_tail(before, reply, after, node.last_token, tools, options)
        except DataError:
            # The template may still take the conversation as a whole: then this is a branch, which is counted.
            return self._begin(root, self._tokenizer.encode_chat(messages, tools, options), segment)
        return self._extend(node, tail, clean, segment[size:])

    def plan_text(self, text: str) -> Plan:
        """Plan the completion of a text. Raises DataError."""
        self._tokenizer.check_text(text)
        root = self._root(b"text")
        node, begin, end = root.find_text(text)
        if node is root:
            return self._begin(root, self._tokenizer.encode_prompt(text, chat=False), text=text)
        node.deliver()
        return self._extend(node, self._tokenizer.encode_text(text[end:]), True, text=text[begin:])

    def plan_tokens(self, token_ids: Sequence[int]) -> Plan:
        """Plan the completion of tokens. They extend any recorded node, also one of a chat."""
        tokens = np.array(token_ids, np.int32)
        root = self._root(b"tokens")
        node, size, _ = find_tokens(self._roots.values(), tokens)
        if not size:
            return self._begin(root, tokens.tolist())
        node.deliver()
        return self._extend(node, tokens[size:].tolist(), True)

    def record(
        self, plan: Plan, completion: Generated, reply: Mapping[str, Any] | None = None, stop: str | None = None
    ) -> Node:
        """Record what the engine returned for a plan.

        ``reply`` is the assistant's message as the agent gets it. Without it, no later request with messages can
        extend the completion. ``stop``: the stop string that was cut from a text; the agent may write it again.
        """
        node = Node(plan.parent, plan.context, completion, plan.drift)
        segment: Segment = ()
        if plan.segment is not None and reply is not None:
            segment = (*plan.segment, form_of({"role": "assistant", **reply}))
        if plan.text is not None:
            sampled = self._tokenizer.completion_text(completion.tokens.tolist())
            text = reply.get("content") if reply is not None else None
            returned = text if isinstance(text, str) else sampled
            node.text = plan.text + returned
            # The agent may write the stop string again. The last token may have brought more than that.
            node.ends = (*([""] if returned else []), *([stop, sampled[len(returned) :]] if stop else []))
        plan.parent.append(node, segment)
        self._latest, self._latest_node = plan, node
        return node

    def deliver(self, node: Node) -> None:
        """Note that the agent has received a completion. Only such completions are trained."""
        node.deliver()

    def rows(self) -> list[Row]:
        """Build one row per leaf. Each sampled token is trained in one of them, and is context in the others."""
        return rows_of(list(self._roots.values()))

    def _root(self, key: bytes) -> Node:
        return self._roots.setdefault(key, Node())

    def _begin(self, root: Node, context: list[int], segment: Segment | None = None, text: str | None = None) -> Plan:
        started = any(other.answered for other in self._roots.values())
        return Plan(context, "branch" if started else "first", root, context, segment, text)

    def _extend(
        self, node: Node, tail: list[int], clean: bool, segment: Segment | None = None, text: str | None = None
    ) -> Plan:
        drift: Drift = "branch" if node.answered else "clean" if clean else "boundary_inserted"
        tokens = self._tokens_of(node)
        tokens += tail
        return Plan(tokens, drift, node, tail, segment, text)

    def _tokens_of(self, node: Node) -> list[int]:
        if node is self._latest_node and self._latest is not None and node.completion is not None:
            return [*self._latest.tokens, *node.completion.tokens.tolist()]
        return node.tokens
