"""Rows of a picture: spans of one process that overlap go to different rows. Pure.

A viewer draws the spans of a row as a stack, so on one row two spans must nest or be apart. A *chain* is the spans of
one unit, such as prefill and decode of a completion. A chain stays on one row for its whole time.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from realsys.timeline.read import Span

#: name of a span -> its group of rows in the process; any other span is in the group ``work``
GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "allocate": "tickets",
        "rollout": "groups",
        "push": "groups",
        "finish": "groups",
        "episode": "episodes",
        "generate": "episodes",
        "reward": "episodes",
        "tool": "episodes",
        "route": "episodes",
        "grant": "grants",
        "update": "updates",
        "queue": "queue",
        "prefill": "completions",
        "decode": "completions",
        "stage": "staging",
        "pause": "pauses",
        "receive": "groups",
        "write": "writes",
        "publish": "publications",
        "evaluate": "evaluations",
        "call": "calls",
        "step": "steps",
        "wait": "steps",
        "plan": "steps",
        "settle": "steps",
        "copy": "steps",
        "report": "steps",
        "save": "steps",
    }
)
OTHER = "work"
#: the same for a ModelWorker, which serves one request at a time; ``write`` is in another thread
_OF_MODEL_WORKERS = MappingProxyType({"receive": "groups", "write": "writes"})

#: Spans of one unit that are further apart need not be on one row: it would be occupied in between.
_GAP_S = 1e-3

#: group and number of a row
Lane = tuple[str, int]


def lanes_of(spans: Sequence[Span]) -> list[tuple[Span, Lane]]:
    """Give every span of one process a row. ``spans``: sorted by begin, longest first.

    In the result the spans of a row are sorted, each parent before its children.
    """
    by_group: dict[str, list[Span]] = {}
    for span in spans:
        by_group.setdefault(_group_of(span), []).append(span)
    placed: list[tuple[Span, Lane]] = []
    for group, members in by_group.items():
        for number, chain in _numbered(_chains(members)):
            placed += [(span, (group, number)) for span in chain]
    placed.sort(key=lambda item: (item[0].begin, -item[0].end))
    return placed


def _group_of(span: Span) -> str:
    if span.process.startswith("model_worker/"):
        return _OF_MODEL_WORKERS.get(span.name, "requests")
    return GROUPS.get(span.name, OTHER)


def _chains(spans: Sequence[Span]) -> list[list[Span]]:
    """Split the spans of a group: those of one unit that nest, or follow each other without a gap, stay together."""
    chains: list[list[Span]] = []
    open_chain: dict[str, tuple[list[Span], list[float]]] = {}  # unit -> chain, ends of its open spans
    for span in spans:
        chain, ends = open_chain.get(span.unit, ([], []))
        last = 0.0
        while ends and ends[-1] <= span.begin:
            last = ends.pop()
        fits = span.end <= ends[-1] if ends else span.begin - last < _GAP_S
        # A span that begins inside of another one and ends after it cannot be drawn on its row.
        if not span.unit or not chain or not fits:
            chain, ends = [], []
            chains.append(chain)
            open_chain[span.unit] = chain, ends
        chain.append(span)
        ends.append(span.end)
    return chains


def _numbered(chains: Sequence[list[Span]]) -> list[tuple[int, list[Span]]]:
    """Give each chain the lowest number that is free for its whole time."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # (end, number)
    count = 0
    numbered = []
    for chain in sorted(chains, key=lambda chain: chain[0].begin):
        while busy and busy[0][0] <= chain[0].begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            number = heapq.heappop(free)
        else:
            number, count = count, count + 1
        heapq.heappush(busy, (max(span.end for span in chain), number))
        numbered.append((number, chain))
    return numbered
