"""The data sets of a trial's evaluations, with all settings that each set takes from ``evaluation`` filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from realsys.config.fields import SmallFloat, arguments_of
from realsys.config.schema import Config, SamplingConfig
from realsys.config.schema_data import HELD_OUT, TRAIN, EvalSetConfig
from realsys.errors import ConfigError

DEMOS = "demos"  # the set of the held-out rows of data.demos, which a supervised run measures
_OWN = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")


class EvalSamplingConfig(SamplingConfig):
    """Sampling of an evaluation: temperature 0 is greedy, which training cannot use."""

    temperature: SmallFloat = 1.0


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """One data set of evaluations.

    split           of the prompts: ``eval`` for the held-out problems, else the name of the set
    source          settings of its data; None: the held-out problems
    problems        before and after training
    every_problems  during training, each ``every_steps`` steps; 0 steps: never
    samples         completions of each problem (n)
    k               numbers for pass@k
    """

    name: str
    split: str
    source: EvalSetConfig | None
    verifier: str
    verifier_args: Mapping[str, Any]
    problems: int
    every_problems: int
    every_steps: int
    samples: int
    k: tuple[int, ...]
    sampling: SamplingConfig = field(repr=False)


def evaluation_sets(config: Config) -> dict[str, EvaluationSet]:
    """Return the sets that are evaluated, by name, the held-out problems first. Raises ConfigError."""
    given = {HELD_OUT: EvalSetConfig()} | config.evaluation.sets
    sets = {name: _filled(config, name, settings) for name, settings in given.items()}
    return {name: made for name, made in sets.items() if made.problems}


def sources_of_sets(config: Config) -> dict[str, EvalSetConfig]:
    """Return the sets that name a source of data, by name. Sets that are off are left out."""
    return {name: made.source for name, made in evaluation_sets(config).items() if made.source is not None}


def id_of_set(eval_id: str, name: str) -> str:
    """Return the id of an evaluation of one set: ``step-10`` for the held-out problems, ``step-10.aime`` for others."""
    return eval_id if name == HELD_OUT else f"{eval_id}.{name}"


def set_of_id(eval_id: str) -> str:
    """Return the set of an evaluation from its id."""
    return eval_id.partition(".")[2] or HELD_OUT


def _filled(config: Config, name: str, own: EvalSetConfig) -> EvaluationSet:
    general, field_name = config.evaluation, f"evaluation.sets.{name}"
    if name in (TRAIN, DEMOS):
        raise ConfigError(field_name, name, "is the name of the prompts or rows to train on: choose another name")
    if name == HELD_OUT and own.path:
        raise ConfigError(f"{field_name}.path", own.path, "the held-out problems are those of data.eval: set that")
    problems = general.problems if own.problems is None else own.problems
    samples = general.samples if own.samples is None else own.samples
    k = general.k if own.k is None else own.k
    if k and max(k) > samples:
        at = "evaluation.k" if own.k is None else f"{field_name}.k"
        raise ConfigError(at, k, f"must not exceed the samples of a problem ({samples})")
    if own.sampling is None:
        sampling = _sampling(config, "evaluation.sampling", general.sampling)
    else:
        sampling = _sampling(config, f"{field_name}.sampling", own.sampling)
    return EvaluationSet(
        name=name,
        split=name if own.path else HELD_OUT,
        source=own if own.path else None,
        verifier=own.verifier or config.data.verifier,
        verifier_args=_verifier_args(config, field_name, own),
        problems=problems,
        every_problems=min(problems, general.every_problems) if own.problems is None else problems,
        every_steps=general.every_steps if own.every_steps is None else own.every_steps,
        samples=samples,
        k=tuple(sorted(set(k))),
        sampling=sampling,
    )


def _verifier_args(config: Config, field_name: str, own: EvalSetConfig) -> dict[str, Any]:
    """Return the arguments of a set's verifier. A verifier process has one set of arguments for each verifier."""
    if own.verifier in ("", config.data.verifier):
        if own.verifier_args not in ({}, config.data.verifier_args):
            problem = "must be data.verifier_args or empty: a trial has one set of arguments for each verifier"
            raise ConfigError(f"{field_name}.verifier_args", own.verifier_args, problem)
        return config.data.verifier_args
    sets = config.evaluation.sets.items()
    given = {
        name: other.verifier_args for name, other in sets if other.verifier == own.verifier and other.verifier_args
    }
    for name, arguments in given.items():
        if own.verifier_args not in ({}, arguments):
            problem = f"must be those of evaluation.sets.{name}: a trial has one set of arguments for each verifier"
            raise ConfigError(f"{field_name}.verifier_args", own.verifier_args, problem)
    return next(iter(given.values()), {})


def verifier_arguments(config: Config) -> dict[str, Mapping[str, Any]]:
    """Return the arguments of each verifier of the trial, by its name."""
    sets = evaluation_sets(config).values()
    return {config.data.verifier: config.data.verifier_args} | {made.verifier: made.verifier_args for made in sets}


def verifier_field(config: Config, verifier: str) -> str:
    """Return the field that names a verifier of the trial; ``_args`` behind it: the field of its arguments."""
    users = {name: own for name, own in config.evaluation.sets.items() if own.verifier == verifier}
    if verifier == config.data.verifier or not users:
        return "data.verifier"
    return f"evaluation.sets.{max(users, key=lambda name: bool(users[name].verifier_args))}.verifier"


def _sampling(config: Config, at: str, given: Mapping[str, Any]) -> SamplingConfig:
    """Return the sampling settings of training, changed by ``given``."""
    for name in given:
        if name not in _OWN:
            raise ConfigError(f"{at}.{name}", given[name], f"use one of {', '.join(_OWN)}")
    base = config.generation.sampling
    made = arguments_of(EvalSamplingConfig, {**base.model_dump(), **given}, at)
    if 0 < made.temperature < 1e-6:
        raise ConfigError(f"{at}.temperature", made.temperature, "must be 0 (greedy) or at least 1e-6")
    if made.max_new_tokens > base.max_new_tokens:
        problem = f"must not exceed generation.sampling.max_new_tokens ({base.max_new_tokens})"
        raise ConfigError(f"{at}.max_new_tokens", made.max_new_tokens, problem)
    if "max_new_tokens" in given and made.max_new_tokens < base.min_new_tokens:
        problem = f"must be at least generation.sampling.min_new_tokens ({base.min_new_tokens})"
        raise ConfigError(f"{at}.max_new_tokens", made.max_new_tokens, problem)
    return made if dict(made) != dict(base) else base
