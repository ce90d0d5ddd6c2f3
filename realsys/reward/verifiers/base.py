"""The contract of a verifier: a function ``(item) -> bool | float | Verdict``, run in a verifier process.

A verifier that cannot tell raises; it never returns False or 0 for that. It may take long, hang, crash or print: its
process bounds that (``pool.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec


class Item(msgspec.Struct, array_like=True):
    """One completion to verify. ``extra``: the keys of the dataset row other than prompt and answer, unchanged."""

    prompt: str
    completion: str
    answer: str  # the reference
    extra: dict[str, Any] = {}


class Verdict(msgspec.Struct, array_like=True):
    """What a verifier says of a completion.

    reward   finite; None: rollout.reward.correct or .wrong, by ``correct``
    correct  None if the task has no right or wrong; then there must be a reward
    metrics  numbers for the step log, averaged over episodes by name
    """

    reward: float | None = None
    correct: bool | None = None
    metrics: dict[str, float] = {}


#: A bool is ``Verdict(correct=...)``, a float (or int) is ``Verdict(reward=...)``.
Verifier = Callable[[Item], "bool | float | Verdict"]
