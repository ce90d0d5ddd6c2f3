"""Warnings about sampling settings."""

import pytest

from realsys.config.rules import sampling_warnings
from realsys.config.schema import SamplingConfig


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"top_p": 0.9, "top_k": 50}, "generation.sampling.top_p=0.9, top_k=50: completions are drawn from a changed"),
        ({"min_p": 0.05}, "generation.sampling.min_p=0.05: "),
        ({"penalties": {"repetition": 1.1}}, "generation.sampling.penalties.repetition=1.1: "),
    ],
)
def test_sampling_that_biases_training_is_named_once(settings, named):
    (line,) = sampling_warnings(SamplingConfig(**settings))
    assert named in line


def test_temperature_and_stops_bias_nothing():
    assert not list(sampling_warnings(SamplingConfig(temperature=0.7, stop=["x"], top_k=0)))
