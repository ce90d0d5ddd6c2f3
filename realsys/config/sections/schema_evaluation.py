"""The ``evaluation`` section of the configuration: data sets, samples per problem, sampling, pinned versions.

Settings of a set that are left out are those of ``evaluation`` itself. The set ``eval`` is always there: the held-out
problems of the trial (``data.eval``, or a part of ``data.train``).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from realsys.config.fields import NonNegative, NonNegativeFloat, OpenProbability, Positive, Section, pattern
from realsys.config.sections.schema_data import AUTO_LAYOUT

HELD_OUT = "eval"  # the set, and the split, of the held-out problems
TRAIN = "train"  # the split of the prompts to train on; no set may have its name
Samples = Annotated[int, Field(ge=1, le=4096)]
SetName = Annotated[
    str,
    pattern(
        r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$", "1 to 32 letters, digits, '_' or '-', and begin with a letter or digit"
    ),
]


class EvalSetConfig(Section):
    """One data set of evaluations, or one more way to sample the held-out problems."""

    path: str = Field("", description="as data.train; empty: the held-out problems of the trial")
    layout: str = Field(AUTO_LAYOUT, description="as data.layout")
    layout_args: dict[str, Any] = Field({}, description="as data.layout_args")
    source_args: dict[str, Any] = Field({}, description="as data.source_args")
    verifier: str = Field("", description="as data.verifier; empty: data.verifier with its arguments")
    verifier_args: dict[str, Any] = Field({}, description="keyword arguments of verifier")
    problems: NonNegative | None = Field(
        None, description="problems of each evaluation, the first of the set; 0: the set is off; null: as evaluation"
    )
    samples: Samples | None = Field(None, description="as evaluation.samples")
    k: list[Positive] | None = Field(None, description="as evaluation.k")
    sampling: dict[str, Any] | None = Field(None, description="as evaluation.sampling")
    every_steps: NonNegative | None = Field(None, description="as evaluation.every_steps")


class EvalConfig(Section):
    """Accuracy on held-out problems and on other data sets (docs/evaluation.md)."""

    problems: NonNegative = Field(512, description="held-out problems before and after training; 0: no evaluation")
    every_steps: NonNegative = Field(0, description="train steps between evaluations during training; 0: none")
    every_problems: Positive = Field(
        256, description="held-out problems of an evaluation during training, or problems, if fewer"
    )
    samples: Samples = Field(1, description="completions of each problem (n)")
    k: list[Positive] = Field([], description="report pass@k for these k, none larger than samples")
    sampling: dict[str, Any] = Field(
        {},
        description="temperature, top_p, top_k, min_p and max_new_tokens of evaluations, if they differ from"
        " generation.sampling; temperature 0: greedy",
    )
    sets: dict[SetName, EvalSetConfig] = Field(
        {},
        description="further data sets by name; each evaluates what it names itself and takes the rest from evaluation;"
        " the set eval has the held-out problems",
    )
    max_failed: NonNegative = Field(
        0, description="completions of an evaluation that may fail; with more it is incomplete and has no numbers"
    )
    hold_share: OpenProbability = Field(
        0.25, description="share of the servers that keep an evaluation's version while the others update; at least one"
    )
    hold_s: NonNegativeFloat = Field(
        600.0,
        description="seconds for which an evaluation may delay weight updates, less than"
        " cluster.request_timeout_s; after them it is incomplete",
    )
