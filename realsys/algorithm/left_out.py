"""Which rows of a batch the actor does not compute, because the loss has no gradient there.

Master and ranks decide alike, from metadata alone: the master plans without the work of these rows, and each rank
leaves them out. They stay in the denominators of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

from realsys.algorithm.advantages import advantages_by_id
from realsys.config.sections.schema_train import PPOConfig
from realsys.types import SequenceRef


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
