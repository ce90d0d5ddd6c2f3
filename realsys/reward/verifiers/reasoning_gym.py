"""The verifier ``reasoning_gym``: a task of ``reasoning_gym:NAME`` is judged by the data set's own function.

The reward is its score, from 0 to 1; partial scores count. A completion is right if its score is 1. The answer is the
text in the last ``<answer>`` element, else in the last line that is not empty.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from realsys.data.sources.reasoning_gym import KEY, entry_of
from realsys.reward.verifiers.contract import Item, Verdict

_OPEN, _CLOSE = "<answer>", "</answer>"


def reasoning_gym(item: Item) -> Verdict:
    """Score the answer of a completion. Raises ValueError for a row that is not from ``reasoning_gym:NAME``."""
    stored = item.extra.get(KEY)
    if not isinstance(stored, dict):
        raise ValueError(f"the row has no key {KEY!r}: this verifier judges tasks of data.train=reasoning_gym:NAME")
    answer = final_answer(item.completion)
    score = float(_judge(stored["name"])(answer, entry_of(item.prompt, stored)))
    if not (math.isfinite(score) and 0.0 <= score <= 1.0):
        raise ValueError(f"reasoning-gym returned the score {score}: it must be between 0 and 1")
    return Verdict(score, correct=score == 1.0, answer=answer or None)


def final_answer(completion: str) -> str:
    """Return what a completion gives as its answer."""
    _, found, after = completion.rpartition(_OPEN)
    if found:
        return after.partition(_CLOSE)[0].strip()
    return completion.strip().rpartition("\n")[2].strip()


@functools.cache
def _judge(name: str) -> Any:
    import reasoning_gym  # 1 s

    return reasoning_gym.get_score_answer_fn(name)
