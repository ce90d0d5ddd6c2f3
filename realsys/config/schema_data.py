"""The sections ``data`` and ``evaluation`` of the configuration.

The name of a source is a path, ``FOLDER@SPLIT``, ``reasoning_gym:NAME``, or ``verifiers:ENV``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from realsys.config.fields import (
    NonNegative,
    Positive,
    PositiveFloat,
    Probability,
    Section,
    pattern,
)

RG = "reasoning_gym:"
VERIFIERS = "verifiers:"
GENERATED = (RG, VERIFIERS)  # sources that are not files
AUTO_LAYOUT = "auto"
HELD_OUT = "eval"  # the set, and the split, of the held-out problems
TRAIN = "train"  # the split of the prompts to train on; no set may have its name
Samples = Annotated[int, Field(ge=1, le=4096)]
SetName = Annotated[
    str,
    pattern(
        r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$", "1 to 32 letters, digits, '_' or '-', and begin with a letter or digit"
    ),
]


# ---- the section data: prompts, their layouts, and the verifier


class ArithForm(Section):
    """A chat that demonstrates the arith task, with places such as {prompt} and {steps} (realsys.data.arith)."""

    prompt: list[dict[str, Any]] = Field(description="messages before the response, in the form of OpenAI's API")
    response: str = Field(description="text to imitate")
    tools: list[str] = Field([], description="names of the tools that the chat template describes")
    weight: PositiveFloat = Field(1.0, description="share of this form, relative to the other weights")


class ArithConfig(Section):
    """Arguments of the arith task: running sums, whose numbers of operands have a heavy tail (P(n) ~ n^-alpha)."""

    min_operands: Annotated[int, Field(ge=2, le=26)] = Field(2, description="fewest numbers in one sum")
    max_operands: Annotated[int, Field(ge=2, le=26)] = Field(20, description="most numbers in one sum")
    alpha: float = Field(1.5, description="exponent of the number of operands: larger means fewer long sums")
    max_operand: Positive = Field(9, description="largest number in a sum; the smallest is 0")
    train_size: Positive = Field(20000, description="problems to train on")
    eval_size: Positive = Field(1024, description="held-out problems")
    demo_size: NonNegative = Field(27000, description="demonstrations for the supervised warm-up")
    demo_noise: Probability = Field(0.15, description="probability that one step of a demonstration has a wrong sum")
    second_tries: Probability = Field(
        0.0, description="share of demonstrations that show a wrong first try, feedback, and a second try"
    )
    feedback: str = Field(
        "", description="text between the two tries, as the agent multi_turn writes it; {prompt} is the problem"
    )
    forms: list[ArithForm] = Field([], description="chats in place of the plain demonstrations; needs model.tiny.chat")


class MixtureSource(Section):
    """One source of ``data.mixture``."""

    path: str = Field(description="as data.train")
    weight: PositiveFloat = Field(1.0, description="share of this source in an epoch, relative to the other weights")
    layout: str = Field(AUTO_LAYOUT, description="as data.layout")
    layout_args: dict[str, Any] = Field({}, description="as data.layout_args")
    source_args: dict[str, Any] = Field({}, description="as data.source_args")


class CurriculumConfig(Section):
    """Choice of prompts by their measured success rate. It is off with min 0 and max 1."""

    min: Probability = Field(0.0, description="a prompt with a lower success rate is shown less often")
    max: Probability = Field(1.0, description="a prompt with a higher success rate is shown less often")

    @property
    def enabled(self) -> bool:
        return self.min > 0 or self.max < 1


class DataConfig(Section):
    """Prompts, held-out problems and the verifier that judges completions."""

    kind: Literal["arith", "jsonl"] = Field("jsonl", description="generate the arith task, or read train and eval")
    train: str = Field(
        "",
        description="file (.jsonl, .json, .parquet, .arrow), folder of a data set, reasoning_gym:NAME or verifiers:ENV",
    )
    eval: str = Field("", description="as train: held-out problems; empty: hold out eval_fraction of train")
    eval_fraction: Probability = Field(0.05, description="share of the rows of train that is held out")
    mixture: list[MixtureSource] = Field([], description="several sources in place of train")
    layout: str = Field(
        AUTO_LAYOUT,
        description="layout of train and eval: auto, a name of docs/data.md, or package.module:function",
    )
    layout_args: dict[str, Any] = Field({}, description="keyword arguments of the layout; needs data.layout")
    source_args: dict[str, Any] = Field(
        {},
        description="of reasoning_gym:NAME: size (1000), seed (0), and those of the data set; of verifiers:ENV: "
        "env_python, args, eval_args, size",
    )
    demos: str = Field(
        "", description="file or folder as train: demonstrations, chats or preferences to learn from (docs/data.md)"
    )
    order: Literal["shuffled", "script"] = Field(
        "shuffled",
        description="new prompts: by the seed, each once per epoch; or those that the training script submits",
    )
    max_prompt_tokens: Positive = Field(1024, description="longest prompt in tokens; see long_prompts")
    long_prompts: Literal["error", "drop"] = Field(
        "error", description="a prompt of more than max_prompt_tokens is an error, or is left out"
    )
    chat_template: bool = Field(True, description="wrap prompts in the tokenizer's chat template if it has one")
    verifier: str = Field("math", description="built-in name (docs/data.md) or package.module:function")
    verifier_args: dict[str, Any] = Field({}, description="keyword arguments of the verifier")
    curriculum: CurriculumConfig = CurriculumConfig()
    arith: ArithConfig = Field(ArithConfig(), description="arguments of the arith task (docs/data.md)")


# ---- names of sources


def split_suffix(source: str) -> tuple[str, str]:
    """Return the path and the split of ``FOLDER@SPLIT``; the split is "" if the whole name exists."""
    path, at, split = source.rpartition("@")
    return (path, split) if at and split and "/" not in split and not os.path.exists(source) else (source, "")


def absolute_source(source: str) -> str:
    """Make the path of a source absolute; generated sources have none."""
    if not source or source.startswith(GENERATED):
        return source
    path, split = split_suffix(os.path.expanduser(source))
    return f"{Path(path).resolve()}@{split}" if split else str(Path(path).resolve())


def source_problem(source: str) -> str:
    """Return why a source cannot be opened, "" if it can."""
    if source.startswith(GENERATED):
        return ""
    path = split_suffix(source)[0]
    readable = (os.path.isfile(path) or os.path.isdir(path)) and os.access(path, os.R_OK)
    return "" if readable else "is not a readable file or folder"


# ---- the section evaluation: data sets, samples per problem, sampling, pinned versions


class EvalSetConfig(Section):
    """One data set of evaluations, or one more way to sample the held-out problems.

    Settings that are left out are those of ``evaluation`` itself. The set ``eval`` is always there: the held-out
    problems of the trial (``data.eval``, or a part of ``data.train``).
    """

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
