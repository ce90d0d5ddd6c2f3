"""Warnings about sampling settings."""

import pytest

from realsys.config.rules.sampling import evaluation_sampling, sampling_warnings
from realsys.config.schema import SamplingConfig
from realsys.errors import ConfigError
from tests.support.processes.config_trees import changed


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"top_p": 0.9, "top_k": 50}, "generation.sampling.top_p=0.9, top_k=50: completions are drawn from a changed"),
        ({"min_p": 0.05}, "generation.sampling.min_p=0.05: "),
        ({"repetition_penalty": 1.1}, "generation.sampling.repetition_penalty=1.1: "),
    ],
)
def test_sampling_that_biases_training_is_named_once(settings, named):
    (line,) = sampling_warnings(SamplingConfig(**settings))
    assert named in line


def test_temperature_and_stops_bias_nothing():
    assert not list(sampling_warnings(SamplingConfig(temperature=0.7, stop=["x"], top_k=0)))


def test_evaluations_have_their_own_sampling():
    config = changed("generation.sampling.max_new_tokens=77", "evaluation.sampling={temperature: 0.6, top_p: 0.95}")
    sampling = evaluation_sampling(config)
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.6, 0.95, 77)
    assert (config.generation.sampling.temperature, config.generation.sampling.top_p) == (1.0, 1.0)
    assert evaluation_sampling(changed()) == changed().generation.sampling


@pytest.mark.parametrize(
    ("given", "field"),
    [("{max_new_tokens: 5}", "evaluation.sampling.max_new_tokens"), ("{top_p: 2.0}", "evaluation.sampling.top_p")],
)
def test_bad_sampling_of_evaluations_is_named(given, field):
    with pytest.raises(ConfigError) as refused:
        evaluation_sampling(changed(f"evaluation.sampling={given}"))
    assert refused.value.field == field
