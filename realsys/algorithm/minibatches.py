"""Plan of a train step: which rows each DP rank trains in each minibatch.

groups --sequence_refs--> refs --plan_minibatches--> minibatches[m][d]

Rows of one episode are always in one minibatch, so that an optimizer step sees whole episodes. They are on one rank
and in one micro-batch if they fit into a micro-batch (``row_units``). Rows of a group that begin alike are, too, where
that saves work (``realsys.algorithm.prefix_tree``).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from itertools import groupby

from realsys.algorithm.advantages import advantages_by_id
from realsys.algorithm.balance import CostFunction, split_balanced, token_costs
from realsys.algorithm.prefix_tree import tree_cost, tree_units
from realsys.config.schema_train import PPOConfig
from realsys.types import CONSTRAINED, SampleMeta, SequenceRef

Unit = list[SequenceRef]

#: units for each part that make parts of about equal cost
_ENOUGH = 4


def sequence_refs(groups: Sequence[Sequence[SampleMeta]]) -> list[SequenceRef]:
    """Return the rows of a batch in order. Groups and episodes are numbered from 0 over the batch."""
    refs: list[SequenceRef] = []
    episodes: dict[tuple[str, int], int] = {}
    for number, group in enumerate(groups):
        last = {(sample.ticket_id, sample.episode): sample.row for sample in group}
        for sample in group:
            key = (sample.ticket_id, sample.episode)
            refs.append(
                SequenceRef(
                    sample_id=sample.sample_id,
                    length=sample.length,
                    loss_tokens=sample.loss_tokens,
                    reward=sample.reward,
                    truncated=sample.truncated,
                    group=number,
                    episode=episodes.setdefault(key, len(episodes)),
                    episode_tokens=sample.episode_tokens or sample.loss_tokens,
                    last=sample.row == last[key],
                    row_truncated=sample.row_truncated,
                    sampled_tokens=sample.sampled_tokens,
                    shared=sample.shared,
                    constrained=sample.metrics.get(CONSTRAINED, 0) > 0,
                )
            )
    return refs


def row_units(refs: Sequence[SequenceRef], capacity: int) -> list[Unit]:
    """Join neighbouring rows of each episode into units of at most ``capacity`` tokens (0: no limit), in order.

    A unit is never divided: it goes to one rank and into one micro-batch. An episode that fits is one unit.
    """
    units: list[Unit] = []
    for _, rows in groupby(refs, key=lambda ref: ref.episode):
        room = 0
        for ref in rows:
            if room >= ref.length:
                units[-1].append(ref)
            else:
                units.append([ref])
                room = capacity or sys.maxsize
            room -= ref.length
    return units


def plan_minibatches(
    refs: Sequence[SequenceRef],
    n_minibatches: int,
    dp: int,
    cost: CostFunction = token_costs,
    *,
    capacity: int = 0,
    left_out: Collection[str] = (),
) -> list[list[list[SequenceRef]]]:
    """Return ``plan[m][d]``, the rows that DP rank d trains in minibatch m; every row exactly once.

    The content of a minibatch depends on the batch alone, not on ``dp``: the same run on another layout
    takes the same optimizer steps. Both splits balance ``cost``. ``capacity`` is the number of tokens of a
    micro-batch; with 0 (no limit) all rows of an episode go to one rank. No minibatch is empty, because
    it would be an optimizer step without data: with fewer episodes than ``n_minibatches``, the plan has
    fewer minibatches. The part of a rank may be empty.

    ``left_out``: ids of the rows that are not computed, whole episodes. They are spread apart from the others:
    the work of the others is balanced, and each minibatch has its share of both, because rows that are left
    out stay in the denominators. If any episode is computed, every minibatch has one.

    Raises ValueError if ``n_minibatches`` or ``dp`` is below 1.
    """
    if n_minibatches < 1 or dp < 1:
        raise ValueError(f"plan_minibatches: {n_minibatches} minibatches over {dp} ranks: both must be at least 1")
    episodes = [list(rows) for _, rows in groupby(refs, key=lambda ref: ref.episode)]
    if not episodes:
        return []
    skipped = frozenset(left_out)
    computed = sum(rows[0].sample_id not in skipped for rows in episodes)
    minibatches = _split(episodes, min(n_minibatches, computed or 1), cost, skipped)
    return [_split(row_units(minibatch, capacity), dp, cost, skipped) for minibatch in minibatches if minibatch]


def _split(units: Sequence[Unit], parts: int, cost: CostFunction, left_out: frozenset[str]) -> list[list[SequenceRef]]:
    """Distribute whole units over ``parts``: computed units of equal cost, and left-out units of equal cost."""
    computed = _split_alike([unit for unit in units if unit[0].sample_id not in left_out], parts, cost)
    others = _split_alike([unit for unit in units if unit[0].sample_id in left_out], parts, cost)
    return [a + b for a, b in zip(computed, others, strict=True)]


def _split_alike(units: Sequence[Unit], parts: int, cost: CostFunction) -> list[list[SequenceRef]]:
    """Distribute whole units over ``parts`` of equal cost.

    Groups whose rows begin alike stay whole if there are enough of them, so that a beginning is computed once.
    """
    trees = tree_units(units)
    if len(trees) >= _ENOUGH * parts:
        units = trees
    sums = [tree_cost(unit, cost) for unit in units]
    return [[ref for i in part for ref in units[i]] for part in split_balanced(sums, parts)]


# ---- rows that the actor does not compute
#
# The loss has no gradient there. Master and ranks decide alike, from metadata alone: the master plans without the work
# of these rows, and each rank leaves them out. They stay in the denominators of the loss.


def counts_in_loss(ref: SequenceRef, cfg: PPOConfig) -> bool:
    """Return True if a row counts in the loss; otherwise its tokens are masked and in no denominator."""
    return not (cfg.truncated_answers == "mask" and ref.truncated)


def rows_left_out(refs: Sequence[SequenceRef], cfg: PPOConfig, max_new_tokens: int, *, by_token: bool) -> set[str]:
    """Return the ids of the rows that need no forward pass of the actor; always all rows of an episode.

    refs      all rows of the train step, with their final rewards
    by_token  True if a call computes advantages of tokens: it reads the log-probs of every row

    These are the rows that do not count in the loss, and with ``skip_zero_advantage`` the rows with advantage
    0. An entropy bonus and a KL to the reference have a gradient also where the advantage is 0: then only
    the first kind is left out.
    """
    if by_token:
        return set()
    left_out = {ref.sample_id for ref in refs if not counts_in_loss(ref, cfg)}
    if cfg.skip_zero_advantage and not cfg.entropy_coef and not cfg.kl.coef:
        advantages = advantages_by_id(refs, cfg, max_new_tokens)
        left_out |= {sample_id for sample_id, advantage in advantages.items() if advantage == 0.0}
    return left_out
