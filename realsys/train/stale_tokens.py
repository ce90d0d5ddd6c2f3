"""Tokens of a row by version, and a row's arrays without the tokens that are too old to be trained. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from realsys.types import ARRAY_KEYS, F32, I32, Mask

Array = npt.NDArray[Any]


def version_tokens(versions: I32) -> list[tuple[int, int]]:
    """Return (version, tokens) of the loss tokens of a row, oldest first; empty for a row of at most one version."""
    numbers, counts = np.unique(versions, return_counts=True)
    return list(zip(numbers.tolist(), counts.tolist(), strict=True)) if len(numbers) > 1 else []


def without_older(arrays: Mapping[str, Array], oldest: int) -> dict[str, Array]:
    """Return a row's arrays with the tokens of versions below ``oldest`` out of the loss; they stay in the context.

    The reward of a token that leaves goes to the loss token before it. Without one it is lost, because it
    follows no token that is left.
    """
    kept = arrays["versions"] >= oldest
    masked = {key: array[kept] if ARRAY_KEYS[key][1] == "loss" else array for key, array in arrays.items()}
    masked["loss_mask"] = arrays["loss_mask"].copy()
    masked["loss_mask"][arrays["loss_mask"]] = kept
    if "token_rewards" in arrays:
        masked["token_rewards"] = _moved_rewards(arrays["token_rewards"], kept)
    return masked


def _moved_rewards(rewards: F32, kept: Mask) -> F32:
    place = np.cumsum(kept) - 1  # index of the token, or of the kept one before it; -1: none
    moved = np.zeros(int(kept.sum()), np.float32)
    np.add.at(moved, place[place >= 0], rewards[place >= 0])
    return moved
