"""From a batch of groups to who trains what: minibatches first, then DP ranks.

groups --sequence_refs--> refs --plan_minibatches--> minibatches[m][d]
"""

from __future__ import annotations

from collections.abc import Sequence

from realsys.buffer.balance import CostFunction, split_balanced, token_costs
from realsys.types import SampleMeta, SequenceRef


def sequence_refs(groups: Sequence[Sequence[SampleMeta]]) -> list[SequenceRef]:
    """The sequences of a batch in order, groups numbered from 0."""
    return [
        SequenceRef(
            sample_id=sample.sample_id,
            length=sample.length,
            prompt_len=sample.prompt_len,
            reward=sample.reward,
            truncated=sample.truncated,
            group=number,
        )
        for number, group in enumerate(groups)
        for sample in group
    ]


def plan_minibatches(
    refs: Sequence[SequenceRef], n_minibatches: int, dp: int, cost: CostFunction = token_costs
) -> list[list[list[SequenceRef]]]:
    """``plan[m][d]``: what DP rank d trains in minibatch m; every sequence exactly once.

    What a minibatch holds depends on the batch alone, not on ``dp``: the same run on another layout takes the same
    optimizer steps. Both splits balance ``cost``; what a micro-batch may hold is bounded in tokens all the same, since
    that is its memory. A minibatch is never empty (it would be an optimizer step on nothing), so with fewer sequences
    than minibatches there are fewer; a rank's part may be empty.

    Raises ValueError when ``n_minibatches`` or ``dp`` is below 1.
    """
    if n_minibatches < 1 or dp < 1:
        raise ValueError(f"plan_minibatches: {n_minibatches} minibatches over {dp} ranks, both must be at least 1")
    if not refs:
        return []
    minibatches = _split(refs, min(n_minibatches, len(refs)), cost)
    return [_split(minibatch, dp, cost) for minibatch in minibatches if minibatch]


def _split(refs: Sequence[SequenceRef], parts: int, cost: CostFunction) -> list[list[SequenceRef]]:
    return [[refs[i] for i in part] for part in split_balanced(cost(refs), parts)]
