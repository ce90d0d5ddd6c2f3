"""Tokens that are too old leave the loss of their row, and nothing else changes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from realsys.algorithm.token_losses import mask_group
from realsys.train.worker.data_manager import DataManager, version_tokens, without_older
from realsys.types import SampleMeta


def test_masked_tokens_leave_loss_and_stay_in_context() -> None:
    data = DataManager(0)
    versions, logprobs = np.array([1, 1, 2, 3], np.int32), np.arange(4, dtype=np.float32)
    mask = np.array([False, True, True, False, True, True])
    data.put("a", {"tokens": np.arange(6), "loss_mask": mask, "behav_logprobs": logprobs, "versions": versions})
    data.put("a", {"token_rewards": np.array([1, 0, 2, 4], np.float32)})
    data.mask_older(["a"], 2)
    assert data.get("a", "tokens").tolist() == [0, 1, 2, 3, 4, 5]
    assert data.get("a", "loss_mask").tolist() == [False, False, False, False, True, True]
    assert data.get("a", "behav_logprobs").tolist() == [2, 3] and data.get("a", "versions").tolist() == [2, 3]
    assert data.get("a", "token_rewards").tolist() == [2, 4], "the reward before all that is left is lost"


def test_reward_of_masked_token_moves_to_the_one_before() -> None:
    """A later turn may be sampled by an older server."""
    arrays = {
        "loss_mask": np.ones(3, bool),
        "versions": np.array([2, 1, 2], np.int32),
        "token_rewards": np.array([1, 5, 2], np.float32),
    }
    assert without_older(arrays, 2)["token_rewards"].tolist() == [6, 2]


@given(
    versions=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    context=st.lists(st.booleans(), max_size=12),
    oldest=st.integers(0, 6),
)
def test_no_older_token_is_left_in_loss(versions: list[int], context: list[bool], oldest: int) -> None:
    """Master and worker make the same choice: from the counts of a row, and from its arrays."""
    mask = np.array([False, *context[: len(versions)], *([True] * len(versions))])
    mask[np.flatnonzero(mask)[len(versions) :]] = False
    arrays = {
        "loss_mask": mask,
        "versions": np.array(versions, np.int32),
        "behav_logprobs": np.arange(len(versions), dtype=np.float32),
        "token_rewards": np.ones(len(versions), np.float32),
    }
    left = without_older(arrays, oldest)
    fresh = [k for k, version in enumerate(versions) if version >= oldest]
    assert left["behav_logprobs"].tolist() == fresh, "nothing else leaves"
    assert left["loss_mask"].sum() == len(fresh) == len(left["versions"]) == len(left["token_rewards"])
    assert not np.any(left["loss_mask"] & ~mask)
    low, high = min(versions), max(versions)
    meta = SampleMeta("t.0/0.0", "t", 0, len(mask), len(versions), 1.0, False, low, high, 0)
    meta.version_tokens = version_tokens(arrays["versions"])
    rows = mask_group([meta], oldest)
    assert sum(row.loss_tokens for row in rows) == len(fresh)
    assert all(row.version_min >= oldest for row in rows)
