"""Tokens of a request on their way from server to client before its reply. Pure, no torch.

    Snapshot ──Delta.line──> Progress ──HTTP──> Received.take ──> completions so far, if the reply never comes

A client that has received a token keeps it when the server dies. The reply repeats all tokens, so lines are read only
if it does not come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from realsys.generation.backend import Completion, Snapshot
from realsys.generation.protocol import Part, Progress, segments_of
from realsys.types import FinishReason, TopLogprobs

_LINE = msgspec.json.Decoder(Progress)


class Delta:
    """The part of a request's snapshots that its client does not have yet."""

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}  # completion -> tokens
        self._ended: set[int] = set()
        self._moved: int | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens that the client has, of all completions."""
        return sum(self._sent.values())

    def next(self, snapshot: Snapshot) -> Progress | None:
        """Return the next line; None if nothing has moved since the last one."""
        moved, self._moved = self._moved, snapshot.moved
        parts = [
            self._part(index, completion, index in snapshot.running)
            for index, completion in enumerate(snapshot.completions)
            if self._is_new(index, completion, index in snapshot.running)
        ]
        return Progress(parts) if parts or moved != snapshot.moved else None

    def _is_new(self, index: int, completion: Completion, running: bool) -> bool:
        ended = not running and index not in self._ended
        return ended or len(completion.tokens) > self._sent.get(index, 0)

    def _part(self, index: int, completion: Completion, running: bool) -> Part:
        begin = self._sent.get(index, 0)
        self._sent[index] = len(completion.tokens)
        if not running:
            self._ended.add(index)
        kv_segments = completion.kv_segments
        return Part(
            index,
            begin,
            completion.tokens[begin:].tolist(),
            completion.logprobs[begin:].tolist(),
            segments_of(_after(completion.segments, begin)),
            None if running else completion.finish_reason,
            None if kv_segments is None else segments_of(_after(kv_segments, begin)),
            None if completion.top is None else completion.top[begin:],
        )


@dataclass(slots=True)
class PartsOfOne:
    """Tokens of one completion that have arrived. ``finish`` is abort while it runs, ``top`` empty if not requested."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv_versions: list[int] = field(default_factory=list)
    top: TopLogprobs = field(default_factory=list)
    finish: FinishReason = "abort"


class Received:
    """Tokens of a request that have arrived before its reply. ``error``: status and message instead of the reply.

    ``on_end`` gets the number of each completion that ends while others of the request continue. ``on_tokens`` gets
    that of each completion with new tokens, as soon as the server has sampled them; None: they may arrive later.
    """

    def __init__(
        self,
        n: int,
        on_end: Callable[[int], None] = lambda _: None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        self._on_end = on_end
        self.on_tokens = on_tokens
        self.completions = [PartsOfOne() for _ in range(n)]
        self.error: tuple[int, str] | None = None

    def take(self, line: bytes) -> None:
        """Add a line. Raises what ``MALFORMED`` lists, and changes nothing, if it cannot be read."""
        progress = _LINE.decode(line)
        versions = [_expanded(part.weight_versions) for part in progress.parts]
        kv_versions = [_expanded(part.kv_versions or part.weight_versions) for part in progress.parts]
        for part, sampled, kv in zip(progress.parts, versions, kv_versions, strict=True):
            if not len(part.output_ids) == len(part.logprobs) == len(sampled) == len(kv):
                raise ValueError(f"completion {part.index} has not as many log-probs and versions as tokens")
            if part.top is not None and len(part.top) != len(part.output_ids):
                raise ValueError(f"completion {part.index} has not as many lists of top log-probs as tokens")
            if not 0 <= part.index < len(self.completions) or part.begin > len(self.completions[part.index].tokens):
                raise ValueError(f"completion {part.index} from token {part.begin} on is not expected")
        for part, sampled, kv in zip(progress.parts, versions, kv_versions, strict=True):
            one = self.completions[part.index]
            one.tokens[part.begin :] = part.output_ids
            one.logprobs[part.begin :] = part.logprobs
            one.versions[part.begin :] = sampled
            one.kv_versions[part.begin :] = kv
            one.top[part.begin :] = part.top or []
            one.finish = part.finish or "abort"
            if self.on_tokens is not None:
                self.on_tokens(part.index)
            if one.finish != "abort":
                self._on_end(part.index)
        if progress.status:
            self.error = progress.status, progress.message


def _expanded(runs: list[tuple[str, int]]) -> list[int]:
    """Return one version per token from (version, tokens) runs in wire form."""
    return [int(version) for version, count in runs for _ in range(count)]


def _after(segments: list[tuple[int, int]], begin: int) -> list[tuple[int, int]]:
    """Return the (version, tokens) runs without their first ``begin`` tokens."""
    rest = []
    for version, count in segments:
        skipped = min(begin, count)
        begin -= skipped
        rest.append((version, count - skipped))
    return rest
