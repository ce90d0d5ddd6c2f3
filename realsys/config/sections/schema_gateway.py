"""The section ``rollout.gateway``: the endpoint of a RolloutWorker for agents that speak OpenAI's HTTP API."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from realsys.config.fields import NonNegative, Positive, PositiveFloat, Section


class GatewayConfig(Section):
    """Endpoint of a RolloutWorker for agents that speak OpenAI's HTTP API (docs/agents.md)."""

    host: str = Field("127.0.0.1", description="address on which the agents reach their RolloutWorker")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        0, description="port of RolloutWorker 0; worker k has port + k; 0: any free port"
    )
    sampling: Literal["policy", "request"] = Field(
        "policy",
        description="temperature, top_p and penalties of a call: those of the trial, or those that the agent sends;"
        " tokens are trained at their own temperature; max_tokens and stop of the agent always count",
    )
    tool_format: str = Field(
        "auto", description="how the model writes tool calls: auto (by its chat template), none, or a name of renderers"
    )
    reasoning_format: Literal["auto", "none", "think"] = Field(
        "auto", description="how the model marks its reasoning: auto (by its chat template), none, or <think> tags"
    )
    max_body: Positive = Field(32 << 20, description="bytes of the body of one request")
    max_in_flight: Positive = Field(32, description="completions of one episode that are sampled at a time")
    max_sampled_tokens: NonNegative = Field(0, description="tokens that one episode may sample; 0: no bound")
    retry_window_s: PositiveFloat = Field(
        60.0, description="seconds in which an agent that lost its connection gets the same completion again"
    )
