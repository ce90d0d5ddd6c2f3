"""Tree of the completions of an episode, and its rows.

    root ──> node ──> node ──> node           a node: context tokens, then one completion, both as the engine saw them
               └────> node                    a branch: the agent rewrote its history, or sampled the same turn again

one-row: a sampled token is trained in one row only. In the rows of later branches it is context.
delivered: a completion that the agent never received is not trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from realsys.generation.client import Generated
from realsys.rollout.conversation.messages import Form
from realsys.rollout.rows import RowBuilder
from realsys.types import I32, Row

Segment = tuple[Form, ...]
Drift = Literal["first", "clean", "boundary_inserted", "branch"]


class Match(NamedTuple):
    """A node whose messages, text or tokens a request begins with.

    begin   place in the request where the children of the node begin
    end     place behind all that the node sampled; after ``begin`` if the agent wrote a stop string again
    """

    node: Node
    begin: int
    end: int


class Node:
    """One completion with the context tokens before it. A root has neither."""

    def __init__(
        self,
        parent: Node | None = None,
        context: Sequence[int] = (),
        completion: Generated | None = None,
        drift: Drift = "first",
    ) -> None:
        self.parent = parent
        self.drift = drift  # drift when the call was planned; drift_of() corrects it for the first child
        self.context: I32 = np.array(context, np.int32)
        self.completion = completion
        self.children: list[Node] = []
        self.delivered = False
        self.trained = True  # False: the completion of an agent that is not trained, or not by this run
        self.reward: float | None = None  # given to its last token
        # The text that a text completion added to its parent's, without the stop string; None in a chat.
        self.text: str | None = None
        self.ends: tuple[str, ...] = ()  # texts behind ``text`` that show that the agent has it
        self._by_segment: dict[Segment, list[Node]] = {}

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

    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def parts(self) -> tuple[I32, ...]:
        """Context and sampled tokens of this node alone."""
        return (self.context,) if self.completion is None else (self.context, self.completion.tokens)

    def append(self, child: Node, segment: Segment = ()) -> None:
        """Add a child; ``segment``: the messages that it adds, its reply included."""
        self.children.append(child)
        if segment:
            self._by_segment.setdefault(segment, []).append(child)

    def deliver(self) -> None:
        """The agent has this completion, and so all before it."""
        node: Node | None = self
        while node is not None and not node.delivered:
            node.delivered = True
            node = node.parent

    def find_messages(self, messages: Segment) -> Match:
        """Return the deepest node below this one whose messages begin ``messages``."""

        def following(node: Node, place: int) -> Iterator[Match]:
            for length in {len(segment) for segment in node._by_segment}:
                for child in node._by_segment.get(messages[place : place + length], ()):
                    yield Match(child, place + length, place + length)

        return deepest([self], following)

    def find_text(self, text: str) -> Match:
        """Return the deepest node below this one whose text begins ``text``."""

        def following(node: Node, place: int) -> Iterator[Match]:
            for child in node.children:
                if child.text is not None and text.startswith(child.text, place):
                    begin = place + len(child.text)
                    written = [len(end) for end in child.ends if text.startswith(end, begin)]
                    if written:
                        yield Match(child, begin, begin + max(written))
                    elif child.delivered and begin < len(text):  # nothing to see of it, and no repeat of its request
                        yield Match(child, begin, begin)

        return deepest([self], following)

    def leaves(self) -> Iterator[Node]:
        """Yield the delivered nodes after which nothing was delivered, in the order of their first nodes."""
        open_ = [self]
        while open_:
            node = open_.pop()
            delivered = [child for child in node.children if child.delivered]
            open_ += reversed(delivered)
            if not delivered and node.completion is not None:
                yield node


def deepest(roots: Iterable[Node], following: Callable[[Node, int], Iterable[Match]]) -> Match:
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


def find_tokens(roots: Iterable[Node], tokens: I32) -> Match:
    """Return the deepest node below any root whose tokens begin ``tokens``."""

    def following(node: Node, place: int) -> Iterator[Match]:
        for child in node.children:
            end = place
            for part in child.parts():
                if not np.array_equal(tokens[end : end + len(part)], part):
                    break
                end += len(part)
            else:
                yield Match(child, end, end)

    return deepest(roots, following)


def drift_of(roots: Sequence[Node]) -> Counter[str]:
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


def rows_of(roots: Sequence[Node]) -> list[Row]:
    """Build one row for each delivered leaf. The first row with a completion trains it; a row trains at least one."""
    rows, done = [], set[Node]()
    for path in (leaf.path() for root in roots for leaf in root.leaves()):
        new = {node for node in path if node.trained} - done
        if not new:
            continue
        done |= new
        rows.append(_row(path, new))
    return rows


def _row(path: Sequence[Node], trained: Collection[Node]) -> Row:
    builder = RowBuilder()
    for node in path:
        builder.context(node.context)
        assert node.completion is not None
        if node not in trained:
            builder.context(node.completion.tokens)
            continue
        builder.completion(node.completion)
        if node.reward is not None and len(node.completion.tokens) and not node.completion.greedy:
            builder.reward(node.reward)
    return builder.row()
