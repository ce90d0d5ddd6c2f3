"""Pairs of a chosen and a rejected response, as rows of a batch."""

import numpy as np

from realsys.algorithm.prefix_tree import shared_beginnings
from realsys.types import SequenceRef
from tests.support.serving.hf_models import VOCAB
from tests.support.training.ppo_batch import Arrays

#: tokens of the prompt, of the chosen and of the rejected response
PAIRS = [(3, 9, 4), (5, 2, 8), (2, 1, 1), (6, 12, 12), (4, 7, 13), (2, 5, 3), (9, 3, 6)]


def make_pairs() -> tuple[list[SequenceRef], dict[str, Arrays]]:
    """Seven pairs; the chosen response is the longer one, the shorter one, or as long."""
    rng = np.random.default_rng(29)
    refs: list[SequenceRef] = []
    arrays: dict[str, Arrays] = {}
    for pair, (context, *responses) in enumerate(PAIRS):
        prompt = rng.integers(0, VOCAB, context)
        rows = [np.concatenate([prompt, rng.integers(0, VOCAB, n)]).astype(np.int32) for n in responses]
        for row, (tokens, shared) in enumerate(zip(rows, shared_beginnings(rows), strict=True)):
            name, own = f"pair-{pair}.0/0.{row}", responses[row]
            refs.append(
                SequenceRef(
                    name, len(tokens), own, 0.0, False, pair, pair, sum(responses), last=row == 1, shared=shared
                )
            )
            arrays[name] = {"tokens": tokens, "loss_mask": np.arange(len(tokens)) >= context}
    return refs, arrays


def deal_pairs(refs: list[SequenceRef], data_ranks: int) -> list[list[SequenceRef]]:
    """Unevenly, whole pairs: the last data rank gets one only."""
    parts: list[list[SequenceRef]] = [[] for _ in range(data_ranks)]
    for start in range(0, len(refs), 2):
        parts[-1 if start == 0 else (start // 2) % max(1, data_ranks - 1)] += refs[start : start + 2]
    return parts
