"""The ``data`` section of the configuration: sources of prompts, their layouts, and the verifier.

The name of a source is a path, ``FOLDER@SPLIT``, ``reasoning_gym:NAME``, or ``verifiers:ENV``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from realsys.config.fields import NonNegative, Positive, PositiveFloat, Probability, Section
from realsys.config.sections.schema_sampling import CurriculumConfig

RG = "reasoning_gym:"
VERIFIERS = "verifiers:"
GENERATED = (RG, VERIFIERS)  # sources that are not files
AUTO_LAYOUT = "auto"


class ArithForm(Section):
    """A chat that demonstrates the arith task, with places such as {prompt} and {steps} (realsys.data.arith)."""

    prompt: list[dict[str, Any]] = Field(description="messages before the response, in the form of OpenAI's API")
    response: str = Field(description="text to imitate")
    tools: list[str] = Field([], description="names of the tools that the chat template describes")
    weight: PositiveFloat = Field(1.0, description="share of this form, relative to the other weights")


class ArithConfig(Section):
    """Running sums written out step by step; completion lengths have a heavy tail (P(n) ~ n^-alpha)."""

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
    demos: str = Field("", description="JSONL file with the keys prompt and response, for the supervised warm-up")
    max_prompt_tokens: Positive = Field(1024, description="longest prompt in tokens; see long_prompts")
    long_prompts: Literal["error", "drop"] = Field(
        "error", description="a prompt of more than max_prompt_tokens is an error, or is left out"
    )
    chat_template: bool = Field(True, description="wrap prompts in the tokenizer's chat template if it has one")
    verifier: str = Field("math", description="built-in name (docs/data.md) or package.module:function")
    verifier_args: dict[str, Any] = Field({}, description="keyword arguments of the verifier")
    curriculum: CurriculumConfig = CurriculumConfig()
    arith: ArithConfig = ArithConfig()


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
