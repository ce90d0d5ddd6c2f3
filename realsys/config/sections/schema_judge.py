"""The section ``rollout.reward.judge``: endpoint, rubric and limits of ``data.verifier=judge`` (docs/rewards.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from realsys.config.fields import NonNegative, Positive, PositiveFloat, Probability, Section, pattern

MOST_CRITERIA = 24  # a verdict has a metric for each, and may have 32


class Criterion(Section):
    """One criterion of a rubric. The judge gives it a score from ``low`` to ``high``."""

    name: Annotated[
        str, pattern(r"^[A-Za-z_][A-Za-z0-9_]{0,31}$", "1 to 32 letters, digits or '_', and begin with no digit")
    ] = Field(description="name in the verdict and in the step log: letters, digits and _")
    description: str = Field("", description="what the judge has to look at")
    weight: PositiveFloat = Field(1.0, description="share of this criterion in the reward, relative to the others")
    low: float = Field(0.0, description="worst score")
    high: float = Field(10.0, description="best score")


class JudgeConfig(Section):
    """A model behind an OpenAI endpoint that judges completions (docs/rewards.md). Used by `data.verifier=judge`."""

    base_url: str = Field("", description="address of the endpoint, with its /v1")
    model: str = Field("", description="name of the model at the endpoint")
    api_key_env: str = Field(
        "", description="environment variable that has the key of the endpoint; empty: it needs none"
    )
    rubric: str = Field(
        "",
        description="text that asks for the verdict, with {completion} or {final} (what follows the thinking part),"
        " {prompt}, {answer}, and {KEY} of the dataset row; empty: compare the completion with the reference",
    )
    rubric_file: str = Field("", description="text file with the rubric, in place of rubric")
    criteria: list[Criterion] = Field(
        [],
        max_length=MOST_CRITERIA,
        description="what is scored; empty: correctness, from 0 to 1",
    )
    correct_from: Probability = Field(
        0.5, description="share of the best score from which a completion counts as correct"
    )
    response_format: Literal["json_schema", "json_object", "none"] = Field(
        "json_schema", description="how the endpoint is asked for JSON; none: by the text of the request only"
    )
    max_tokens: Positive = Field(1024, description="longest reply of the judge in tokens")
    request: dict[str, Any] = Field(
        {}, description="fields of the request body over those of realsys; null leaves a field out"
    )
    concurrency: Positive = Field(16, description="requests at a time, of all RolloutWorkers together")
    requests_per_minute: NonNegative = Field(
        0, description="requests in any minute, of all RolloutWorkers together; 0: no limit"
    )
    tokens_per_minute: NonNegative = Field(
        0, description="tokens of requests and replies in any minute, of all RolloutWorkers together; 0: no limit"
    )
    timeout_s: PositiveFloat = Field(60.0, description="seconds that one request may take")
    retries: NonNegative = Field(
        4, description="further requests for one completion after a malformed verdict, a time-out or status 500"
    )
    outage_s: PositiveFloat = Field(
        600.0, description="seconds for which a completion waits for an endpoint that is busy or cannot be reached"
    )
