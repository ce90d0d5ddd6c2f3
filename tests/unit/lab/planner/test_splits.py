"""Splits and variants of a configuration, and the choice among predictions."""

from __future__ import annotations

import pytest

from realsys.errors import ConfigError
from realsys.lab.planner.predictions import (
    MOST_SPLITS,
    Interval,
    Prediction,
    devices_of,
    given,
    recommend,
    scaled,
    split_variants,
    splits,
    what_ifs,
)
from realsys.lab.planner.steady_state import check_layouts
from tests.support.planner.recordings import config_of


@pytest.mark.parametrize(
    ("allocation", "devices", "expected"),
    [
        ("serve.d1+d1", 2, ["serve.d1m1+d1p1m1"]),
        ("serve.d2+d2", 4, ["serve.d1m1+d3p1m1", "serve.d2m1+d2p1m1", "serve.d3m1+d1p1m1"]),
        ("serve.d1m2+d1p2m2", 8, ["serve.d1m2+d1p2m2", "serve.d2m2+d1p2m2"]),
        ("serve.d1+actor.d1+critic.d1", 8, ["serve.d1+actor.d1+critic.d1"]),
    ],
)
def test_splits_use_the_devices(allocation: str, devices: int, expected: list[str]) -> None:
    assert splits(config_of([f"allocation={allocation}"]), devices) == expected


@pytest.mark.parametrize("predicted", [devices_of, lambda config: check_layouts(config_of(), config)])
def test_alternation_is_refused(predicted) -> None:
    with pytest.raises(ConfigError, match=r"fits no cost of .* in turn: record and plan runs with \+"):
        predicted(config_of(["allocation=serve.d1|d2"]))


def test_many_splits_are_thinned_evenly() -> None:
    found = splits(config_of(), 64)
    assert len(found) == MOST_SPLITS
    assert (found[0], found[-1]) == ("serve.d1m1+d63p1m1", "serve.d63m1+d1p1m1")


def test_shared_cores_take_a_process_more() -> None:
    labels = [variant.label for variant in split_variants(config_of(), 2, cores=2.0)]
    assert labels == [
        "allocation=serve.d1+d1",
        "allocation=serve.d1m1+d2p1m1",
        "allocation=serve.d2m1+d1p1m1",
    ]
    assert len(split_variants(config_of(), 2, cores=0.0)) == 1
    assert devices_of(config_of()) == 2


def test_what_ifs_change_one_thing_each() -> None:
    assert [variant.label for variant in what_ifs(config_of())] == [
        "train.batch_groups=4",
        "train.batch_groups=16",
        "asynchronous.max_staleness=0",
        "asynchronous.max_staleness=1",
        "asynchronous.max_staleness=4",
        "lengths x 0.5",
        "lengths x 2",
    ]
    assert scaled(config_of(), 2.0).config.generation.sampling.max_new_tokens == 256
    assert given(config_of(), ["train.batch_groups=4 rollout.workers=3"])[0].config.rollout.workers == 3


def test_fastest_split_with_few_servers_is_recommended() -> None:
    found = [_prediction("slow", 80.0), _prediction("fast", 99.5), _prediction("same with more servers", 100.0)]
    assert recommend(found).label == "fast"


def test_split_beyond_the_devices_is_not_recommended() -> None:
    """The recorded run may have had more devices than there are now."""
    found = [_prediction("recorded", 100.0, "serve.d6+d2"), _prediction("fits", 50.0, "serve.d3+d1")]
    assert recommend(found, devices=4).label == "fits"
    assert recommend(found).label == "recorded"


def test_too_few_devices_are_refused() -> None:
    config = config_of(["allocation=serve.d1m2+d1p2m2"])
    with pytest.raises(ConfigError, match="--devices=4: is too few"):
        split_variants(config, 4, cores=0.0)


def _prediction(label: str, speed: float, allocation: str = "serve.d1+d1") -> Prediction:
    interval = Interval(speed, 0.9 * speed, 1.1 * speed)
    return Prediction(label, config_of([f"allocation={allocation}"]), interval, interval, 0.0)
