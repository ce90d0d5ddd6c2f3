"""Splits of the devices between servers and trainer, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence

from realsys.config.allocation import parse_allocation
from realsys.config.schema import Config
from realsys.planner.predict import Prediction

MOST_SPLITS = 7  # more are thinned out, evenly


def devices_of(config: Config) -> int:
    """Return the number of devices of ``config.allocation``."""
    allocation = parse_allocation(config.allocation)
    return allocation.inference.world_size + allocation.workers


def splits(config: Config, devices: int) -> list[str]:
    """Return the allocations that put ``devices`` to use with the layouts of ``config.allocation``, few servers first.

    A server and a data rank of the trainer keep their size (tensor and pipeline parallelism); their numbers change. A
    batch must have an episode for each data rank. With several roles in the expression only the recorded one is left.
    """
    allocation = parse_allocation(config.allocation)
    if len(allocation.roles) > 1:
        return [config.allocation]
    server, rank = allocation.inference, allocation.actor
    rank_size = rank.pipeline * rank.tensor
    found = []
    for servers in range(1, devices // server.tensor + 1):
        ranks = (devices - servers * server.tensor) // rank_size
        if ranks >= 1:
            found.append(f"serve.d{servers}m{server.tensor}+d{ranks}p{rank.pipeline}m{rank.tensor}")
    return _thinned(found)


def _thinned(found: list[str]) -> list[str]:
    if len(found) <= MOST_SPLITS:
        return found
    last = len(found) - 1
    return [found[round(k * last / (MOST_SPLITS - 1))] for k in range(MOST_SPLITS)]


def recommend(predictions: Sequence[Prediction], devices: int = 0) -> Prediction:
    """Return the fastest prediction that needs at most ``devices``; 0: no limit.

    Of those that are as fast within a percent, the first.
    """
    fitting = [each for each in predictions if not devices or devices_of(each.config) <= devices]
    fastest = max(prediction.tokens_per_s.mid for prediction in fitting)
    return next(prediction for prediction in fitting if prediction.tokens_per_s.mid >= 0.99 * fastest)
