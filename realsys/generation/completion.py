"""A completion on its way from an engine to its row: one record, whole or so far. No torch.

    engine ──Completion──> server.py ══CompletionReply, ProgressPart══> client.py ──Completion──> segments of one call
                                                                                     ──Completion.joined──> row

On the wire, versions are runs: (version, number of tokens), in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from realsys.types import F32, I32, FinishReason, TopLogprobs

Runs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion of T tokens. Its arrays are never changed.

    tokens       int32 [T]; a stop token is the last of them
    logprobs     float32 [T], natural, of softmax(logits / temperature), before top-k and top-p
    versions     int32 [T]: weights that sampled each token
    finish_reason  abort while it is sampled, and if a call or the client ended it
    route        (server, token count) runs, in order
    kv_versions  int32 [T]: weights that computed the oldest key that each token attended to; None: as ``versions``
    top          most probable tokens at each token, in the distribution of ``logprobs``; None if not requested
    temperature  that of the request if it is not the trial's; None: the trial's; 0: the request was greedy
    matched      stop token or stop string that ended it
    policy       name of the pinned version that sampled it, whose tokens are not trained; "": the policy in training
    """

    tokens: I32
    logprobs: F32
    versions: I32
    finish_reason: FinishReason = "abort"
    route: tuple[tuple[str, int], ...] = ()
    kv_versions: I32 | None = None
    top: TopLogprobs | None = None
    temperature: float | None = None
    matched: int | str | None = None
    policy: str = ""

    @classmethod
    def of(
        cls,
        tokens: Sequence[int] | I32,
        logprobs: Sequence[float] | F32,
        versions: Runs,
        finish_reason: FinishReason = "abort",
        *,
        kv_versions: Runs | None = None,
        top: TopLogprobs | None = None,
        matched: int | str | None = None,
    ) -> Self:
        """Build a completion from lists and runs.

        Raises ValueError if their lengths differ, OverflowError for a number that is no token or version.
        """
        counts = [count for _, count in versions]
        kv_counts = counts if kv_versions is None else [count for _, count in kv_versions]
        lengths = {len(tokens), len(logprobs), sum(counts), sum(kv_counts), len(tokens if top is None else top)}
        if len(lengths) > 1 or min(counts + kv_counts, default=0) < 0:
            raise ValueError(
                f"{len(tokens)} tokens but {len(logprobs)} log-probs and versions of {counts}"
                + ("" if kv_versions is None else f", of keys {kv_counts}")
                + ("" if top is None else f", {len(top)} lists of top log-probs")
            )
        sampled_by, keys = _expanded(versions), None if kv_versions is None else _expanded(kv_versions)
        return cls(
            np.asarray(tokens, np.int32),
            np.asarray(logprobs, np.float32),
            sampled_by,
            finish_reason,
            kv_versions=None if keys is None or np.array_equal(keys, sampled_by) else keys,
            top=top,
            matched=matched,
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Join the parts of one completion. Its end is that of the last part."""
        if len(parts) == 1:
            return parts[0]
        full = [part for part in parts if len(part.tokens)] or parts[-1:]
        tops = [part.top for part in full]
        return replace(
            parts[-1],
            tokens=np.concatenate([part.tokens for part in full]),
            logprobs=np.concatenate([part.logprobs for part in full]),
            versions=np.concatenate([part.versions for part in full]),
            route=tuple(run for part in full for run in part.route),
            kv_versions=joined_kv_versions(full),
            top=None if None in tops else [best for top in tops for best in top or []],
        )

    def part(self, begin: int, end: int | None = None) -> Self:
        """Return the tokens from ``begin`` to before ``end``. It has no route."""
        return replace(
            self,
            tokens=self.tokens[begin:end],
            logprobs=self.logprobs[begin:end],
            versions=self.versions[begin:end],
            route=(),
            kv_versions=None if self.kv_versions is None else self.kv_versions[begin:end],
            top=None if self.top is None else self.top[begin:end],
        )

    @property
    def trainable(self) -> bool:
        """Return False if the policy in training has not sampled the tokens: greedy ones, and those of a pin."""
        return self.temperature != 0 and not self.policy

    @property
    def segments(self) -> Runs:
        """``versions`` as runs."""
        return _runs(self.versions)

    @property
    def kv_segments(self) -> Runs | None:
        """``kv_versions`` as runs."""
        return None if self.kv_versions is None else _runs(self.kv_versions)


#: a completion that has not begun
EMPTY = Completion(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))


def joined_kv_versions(completions: Sequence[Completion]) -> I32 | None:
    """Return the ``kv_versions`` of completions one after another; None if no completion has them."""
    if all(completion.kv_versions is None for completion in completions):
        return None
    return np.concatenate([c.versions if c.kv_versions is None else c.kv_versions for c in completions])


def _expanded(runs: Runs) -> I32:
    return np.repeat(np.asarray([version for version, _ in runs], np.int32), [count for _, count in runs])


def _runs(versions: I32) -> Runs:
    ends = [*np.flatnonzero(np.diff(versions)) + 1, len(versions)] if len(versions) else []
    return [(int(versions[begin]), int(end - begin)) for begin, end in zip([0, *ends], ends, strict=False)]
