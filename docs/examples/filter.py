"""A filter of finished groups: train.ppo.filter.accept=filter:should_accept

The text before a colon is the reason that the ledger counts.
"""

from collections.abc import Sequence

from realsys.types import Episode


def should_accept(episodes: Sequence[Episode]) -> bool | str:
    """Refuse a group of which half was cut off, and one whose rewards are almost equal."""
    cut = sum(episode.rows[-1].finish_reason == "length" for episode in episodes)
    if 2 * cut >= len(episodes):
        return f"cut off: {cut} of {len(episodes)} episodes"
    rewards = [episode.reward for episode in episodes]
    return True if max(rewards) - min(rewards) >= 0.1 else "similar rewards"
