"""Token identity of an agent that speaks messages or text: its requests become rows of recorded tokens.

    plan(messages) ──tokens──> engine ──Completion──> record() ──CompletionNode──> reply to the agent ──> deliver()
                                                                                   rows() ──> one Row per leaf

A request extends the longest recorded conversation that it begins with. Only the tail after that is tokenised, so
sampled tokens stay as they were. ``drift`` counts how each completion was joined:

    first              nothing was recorded before
    clean              the completion before it ended with the template's own stop token
    boundary_inserted  it did not (cut off, stop string, another stop token): the tail inserts the end of its turn
    branch             the request rewrote its history, or repeats a turn: a further row
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from realsys.data.chat import NO_OPTIONS, Tools, text_of
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import MALFORMED, DataError
from realsys.generation.completion import Completion
from realsys.rollout.episodes import RowBuilder
from realsys.types import I32, Row

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The input of one call of the engine.

    tokens   all tokens before the completion
    drift    how they join the recorded tokens
    parent   the node that they extend, ``context`` the tokens after it
    segment  canonical forms of the messages after ``parent``; None if the request had no messages
    text     text after the one that was returned for ``parent``, in a request for the completion of a text
    """

    tokens: list[int]
    drift: Drift
    parent: CompletionNode
    context: list[int]
    segment: Segment | None = None
    text: str | None = None


class Conversation:
    """All that one episode sampled. No I/O: the caller calls the engine between ``plan`` and ``record``."""

    def __init__(self, tokenizer: TextTokenizer, chat: bool = True) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._roots: dict[bytes, CompletionNode] = {}
        self._latest: RequestPlan | None = (
            None  # plan of the node recorded last, which the next request usually extends
        )
        self._latest_node: CompletionNode | None = None

    @property
    def drift(self) -> Counter[str]:
        """Number of delivered completions by the way they were joined. ``rows`` has one row more than branches."""
        return count_branches(list(self._roots.values()))

    def plan(self, messages: Messages, tools: Tools = (), options: Mapping[str, Any] = NO_OPTIONS) -> RequestPlan:
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

    def plan_text(self, text: str) -> RequestPlan:
        """Plan the completion of a text. Raises DataError."""
        self._tokenizer.check_text(text)
        root = self._root(b"text")
        node, begin, end = root.find_text(text)
        if node is root:
            return self._begin(root, self._tokenizer.encode_prompt(text, chat=False), text=text)
        node.deliver()
        return self._extend(node, self._tokenizer.encode_text(text[end:]), True, text=text[begin:])

    def plan_tokens(self, token_ids: Sequence[int]) -> RequestPlan:
        """Plan the completion of tokens. They extend any recorded node, also one of a chat."""
        tokens = np.array(token_ids, np.int32)
        root = self._root(b"tokens")
        node, size, _ = find_tokens(self._roots.values(), tokens)
        if not size:
            return self._begin(root, tokens.tolist())
        node.deliver()
        return self._extend(node, tokens[size:].tolist(), True)

    def record(
        self, plan: RequestPlan, completion: Completion, reply: Mapping[str, Any] | None = None, stop: str | None = None
    ) -> CompletionNode:
        """Record what the engine returned for a plan.

        ``reply`` is the assistant's message as the agent gets it. Without it, no later request with messages can
        extend the completion. ``stop``: the stop string that was cut from a text; the agent may write it again.
        """
        node = CompletionNode(plan.parent, plan.context, completion, plan.drift)
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

    def deliver(self, node: CompletionNode) -> None:
        """Note that the agent has received a completion. Only such completions are trained."""
        node.deliver()

    def rows(self) -> list[Row]:
        """Build one row per leaf. Each sampled token is trained in one of them, and is context in the others."""
        return rows_of(list(self._roots.values()))

    def _root(self, key: bytes) -> CompletionNode:
        return self._roots.setdefault(key, CompletionNode())

    def _begin(
        self, root: CompletionNode, context: list[int], segment: Segment | None = None, text: str | None = None
    ) -> RequestPlan:
        started = any(other.answered for other in self._roots.values())
        return RequestPlan(context, "branch" if started else "first", root, context, segment, text)

    def _extend(
        self,
        node: CompletionNode,
        tail: list[int],
        clean: bool,
        segment: Segment | None = None,
        text: str | None = None,
    ) -> RequestPlan:
        drift: Drift = "branch" if node.answered else "clean" if clean else "boundary_inserted"
        tokens = self._tokens_of(node)
        tokens += tail
        return RequestPlan(tokens, drift, node, tail, segment, text)

    def _tokens_of(self, node: CompletionNode) -> list[int]:
        if node is self._latest_node and self._latest is not None and node.completion is not None:
            return [*self._latest.tokens, *node.completion.tokens.tolist()]
        return node.tokens


# ---- canonical forms: two messages with the same form are the same message
#
# An agent sends the assistant's message back through its own types. So these differences do not count:
#
#     content      missing, null or "" in a call; a text or a list of text parts; white space at its ends in a reply
#     arguments    any text of the same JSON value
#     ids          of tool calls: the call that a result belongs to counts, not its name
#     other keys   refusal, annotations, reasoning_content, ...


#: role, text, and calls or the called tool
Form = tuple[str, str, str]

KEPT_CALLS = 4096  # an agent sends the calls of all earlier turns again with each request
_ENCODE = msgspec.json.Encoder(order="sorted").encode
_DECODE = msgspec.json.Decoder().decode


def forms(messages: Iterable[Mapping[str, Any]]) -> list[Form]:
    """Return the canonical forms of a whole conversation. Raises DataError for a message without role or text."""
    calls: dict[str, int] = {}  # id -> number of the call in the conversation
    result = []
    for message in messages:
        form = form_of(message)
        if form[0] == "tool":
            name = str(message.get("tool_call_id") or "")
            form = ("tool", form[1], str(calls.get(name, name)))
        for call in message.get("tool_calls") or ():
            calls[str(call.get("id"))] = len(calls)
        result.append(form)
    return result


def form_of(message: Mapping[str, Any]) -> Form:
    """Return the canonical form of one message other than the result of a tool. Raises DataError."""
    role = message.get("role") if type(message) is dict or isinstance(message, Mapping) else None
    if not isinstance(role, str):
        raise DataError("a message must be an object with a role")
    content = message.get("content")
    text = content if type(content) is str else text_of(content) or ""
    if role != "assistant":
        return role, text, str(message.get("name") or "")
    calls = message.get("tool_calls")
    return role, text.strip(), "".join([_call(call) for call in calls]) if calls else ""


def key_of(*values: Any) -> bytes:
    """Return equal bytes for equal JSON values."""
    return _ENCODE(values)


def _call(call: Any) -> str:
    function = call.get("function") if type(call) is dict else None
    if type(function) is not dict:
        raise DataError("a tool call must be an object with a function")
    arguments = function.get("arguments") or {}
    name = function.get("name")
    if isinstance(name, str) and isinstance(arguments, str):
        return _canonical(name, arguments)
    return _ENCODE([name, arguments]).decode()


@functools.lru_cache(maxsize=KEPT_CALLS)
def _canonical(name: str, arguments: str) -> str:
    try:
        value = _DECODE(arguments)
    except (ValueError, *MALFORMED):
        value = arguments  # a text that is not JSON is compared as text
    return _ENCODE([name, value or {}]).decode()


# ---- tree of the completions of an episode, and its rows
#
#     root ──> node ──> node ──> node           a node: context tokens, then one completion, both as the engine saw them
#                └────> node                    a branch: the agent rewrote its history, or sampled the same turn again
#
# one-row: a sampled token is trained in one row only. In the rows of later branches it is context.
# delivered: a completion that the agent never received is not trained.


Segment = tuple[Form, ...]
Drift = Literal["first", "clean", "boundary_inserted", "branch"]


class Match(NamedTuple):
    """A node whose messages, text or tokens a request begins with.

    begin   place in the request where the children of the node begin
    end     place behind all that the node sampled; after ``begin`` if the agent wrote a stop string again
    """

    node: CompletionNode
    begin: int
    end: int


class CompletionNode:
    """One completion with the context tokens before it. A root has neither."""

    def __init__(
        self,
        parent: CompletionNode | None = None,
        context: Sequence[int] = (),
        completion: Completion | None = None,
        drift: Drift = "first",
    ) -> None:
        self.parent = parent
        self.drift = drift  # drift when the call was planned; count_branches() corrects it for the first child
        self.context: I32 = np.array(context, np.int32)
        self.completion = completion
        self.children: list[CompletionNode] = []
        self.delivered = False
        self.trained = True  # False: the completion of an agent that is not trained, or not by this run
        self.reward: float | None = None  # given to its last token
        # The text that a text completion added to its parent's, without the stop string; None in a chat.
        self.text: str | None = None
        self.ends: tuple[str, ...] = ()  # texts behind ``text`` that show that the agent has it
        self._by_segment: dict[Segment, list[CompletionNode]] = {}

    @property
    def tokens(self) -> list[int]:
        """All tokens from the root on."""
        parts = [part for node in self.path() for part in node.parts()]
        return [token for part in parts for token in part.tolist()]

    @property
    def last_token(self) -> int | None:
        """The last sampled token; None if nothing was sampled."""
        return int(self.completion.tokens[-1]) if self.completion is not None and len(self.completion.tokens) else None

    @property
    def answered(self) -> bool:
        """True if the agent received a completion after this one."""
        return any(child.delivered for child in self.children)

    def path(self) -> list[CompletionNode]:
        """The nodes from below the root to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def parts(self) -> tuple[I32, ...]:
        """Context and sampled tokens of this node alone."""
        return (self.context,) if self.completion is None else (self.context, self.completion.tokens)

    def append(self, child: CompletionNode, segment: Segment = ()) -> None:
        """Add a child; ``segment``: the messages that it adds, its reply included."""
        self.children.append(child)
        if segment:
            self._by_segment.setdefault(segment, []).append(child)

    def deliver(self) -> None:
        """The agent has this completion, and so all before it."""
        node: CompletionNode | None = self
        while node is not None and not node.delivered:
            node.delivered = True
            node = node.parent

    def find_messages(self, messages: Segment) -> Match:
        """Return the deepest node below this one whose messages begin ``messages``."""

        def following(node: CompletionNode, place: int) -> Iterator[Match]:
            for length in {len(segment) for segment in node._by_segment}:
                for child in node._by_segment.get(messages[place : place + length], ()):
                    yield Match(child, place + length, place + length)

        return deepest([self], following)

    def find_text(self, text: str) -> Match:
        """Return the deepest node below this one whose text begins ``text``."""

        def following(node: CompletionNode, place: int) -> Iterator[Match]:
            for child in node.children:
                if child.text is not None and text.startswith(child.text, place):
                    begin = place + len(child.text)
                    written = [len(end) for end in child.ends if text.startswith(end, begin)]
                    if written:
                        yield Match(child, begin, begin + max(written))
                    elif child.delivered and begin < len(text):  # nothing to see of it, and no repeat of its request
                        yield Match(child, begin, begin)

        return deepest([self], following)

    def leaves(self) -> Iterator[CompletionNode]:
        """Yield the delivered nodes after which nothing was delivered, in the order of their first nodes."""
        open_ = [self]
        while open_:
            node = open_.pop()
            delivered = [child for child in node.children if child.delivered]
            open_ += reversed(delivered)
            if not delivered and node.completion is not None:
                yield node


def deepest(roots: Iterable[CompletionNode], following: Callable[[CompletionNode, int], Iterable[Match]]) -> Match:
    """Return the longest match below the roots. Of equal ones the agent continues one that it received, the latest.

    ``following``: the children of a node that a request contains from a place on, in the order in which they came.
    """
    open_ = [Match(root, 0, 0) for root in roots]
    best = open_[0]
    while open_:
        match = open_.pop()
        if (match.end, match.node.delivered) > (best.end, best.node.delivered):
            best = match
        open_ += following(match.node, match.begin)
    return best


def find_tokens(roots: Iterable[CompletionNode], tokens: I32) -> Match:
    """Return the deepest node below any root whose tokens begin ``tokens``."""

    def following(node: CompletionNode, place: int) -> Iterator[Match]:
        for child in node.children:
            end = place
            for part in child.parts():
                if not np.array_equal(tokens[end : end + len(part)], part):
                    break
                end += len(part)
            else:
                yield Match(child, end, end)

    return deepest(roots, following)


def count_branches(roots: Sequence[CompletionNode]) -> Counter[str]:
    """Count how the delivered completions were joined. All but the first one after a node are branches."""
    drift: Counter[str] = Counter()
    first_root = True
    for root in roots:
        open_ = [root]
        while open_:
            node = open_.pop()
            delivered = [child for child in node.children if child.delivered]
            for number, child in enumerate(delivered):
                drift["branch" if number or (node is root and not first_root) else child.drift] += 1
            first_root = first_root and not delivered
            open_ += delivered
    return drift


def rows_of(roots: Sequence[CompletionNode]) -> list[Row]:
    """Build one row for each delivered leaf. The first row with a completion trains it; a row trains at least one."""
    rows, done = [], set[CompletionNode]()
    for path in (leaf.path() for root in roots for leaf in root.leaves()):
        new = {node for node in path if node.trained} - done
        if not new:
            continue
        done |= new
        rows.append(_row(path, new))
    return rows


def _row(path: Sequence[CompletionNode], trained: Collection[CompletionNode]) -> Row:
    builder = RowBuilder()
    for node in path:
        builder.context(node.context)
        assert node.completion is not None
        if node not in trained:
            builder.context(node.completion.tokens)
            continue
        builder.completion(node.completion)
        if node.reward is not None and len(node.completion.tokens) and node.completion.trainable:
            builder.reward(node.reward)
    return builder.row()
