"""The section ``rollout`` of the configuration: agents, their endpoint, choice of episodes, and rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from realsys.config.fields import NonNegative, Positive, PositiveFloat, Section

# ---- a user's agent: bounds on its episodes, and the endpoint of agents that speak HTTP (docs/agents.md)


class AgentLimitsConfig(Section):
    """Bounds on one episode. An episode that reaches one fails or ends; other episodes continue."""

    episode_timeout_s: PositiveFloat = Field(
        3600.0, description="seconds for one episode, with its waits for the engine; longer: the episode fails"
    )
    max_turns: Positive = Field(32, description="model calls of one episode over base_url")
    max_tokens: NonNegative = Field(
        0,
        description="tokens of the longest row of an agent that does not tell it: the prompt and all that follows; 0:"
        " data.max_prompt_tokens + max_new_tokens",
    )
    memory_mb: Positive = Field(
        2048, description="MiB that an episode in a process may allocate; all of its processes together twice as much"
    )


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
    max_sampled_tokens: NonNegative = Field(0, description="tokens that one episode may sample; 0: no bound")


# ---- rewards


class RewardConfig(Section):
    """Rewards and the processes that compute them."""

    processes: Positive = Field(
        1, description="verifier processes per RolloutWorker; with services: per reward service"
    )
    services: NonNegative = Field(
        0,
        description="processes that judge for all RolloutWorkers (docs/rewards.md); 0: each judges for itself",
    )
    timeout_s: PositiveFloat = Field(10.0, description="seconds of CPU time that a verifier may use for one completion")
    elapsed_timeout_s: PositiveFloat = Field(
        60.0, description="seconds on the clock that a verifier may take for one completion, its waits included"
    )
    correct: float = Field(5.0, description="reward of a correct completion if the verifier returns True")
    wrong: float = Field(-5.0, description="reward of a wrong completion if the verifier returns False")


# ---- the whole section


class KeepConfig(Section):
    """Choice of the episodes of a finished group that are trained; the others are sampled only to choose from."""

    episodes: NonNegative = Field(0, description="episodes of a group that are trained; 0: all")
    by: Literal["spread", "best"] = Field(
        "spread", description="those whose rewards have the largest variance, or those with the highest rewards"
    )


class RolloutConfig(Section):
    """RolloutWorkers, agents and environments."""

    workers: Positive = Field(2, description="number of RolloutWorker processes")
    group_size: Positive = Field(16, description="episodes per prompt")
    oversample: NonNegative = Field(
        0, description="further episodes per prompt; when group_size have ended, the others are cancelled"
    )
    keep: KeepConfig = KeepConfig()
    min_episodes: NonNegative = Field(
        0, description="train a group if at least this number of its episodes succeeded or have no verdict; 0: all"
    )
    max_concurrent: Positive = Field(64, description="groups that one RolloutWorker runs at a time")
    agent: str = Field(
        "single_turn",
        description="single_turn, multi_turn, tool_use, distill, verifiers, or package.module:name of a class or"
        " function",
    )
    agent_args: dict[str, Any] = Field({}, description="keyword arguments of the agent")
    agent_process: Literal["auto", "always", "never"] = Field(
        "auto",
        description="run each episode of an agent with base_url in a process of its own; auto: if its run is not async",
    )
    agent_python: str = Field(
        "", description="interpreter for an agent with base_url, which needs no realsys there; empty: that of realsys"
    )
    agent_limits: AgentLimitsConfig = AgentLimitsConfig()
    environment: str = Field(
        "verifier", description="verifier, or package.module:Class with judge, or with reset, step and close"
    )
    environment_args: dict[str, Any] = Field({}, description="keyword arguments of the environment")
    gateway: GatewayConfig = GatewayConfig()
    max_attempts: Positive = Field(3, description="attempts at one ticket before it is dropped")
    reward: RewardConfig = RewardConfig()

    @property
    def sampled_episodes(self) -> int:
        """Episodes that start for a prompt."""
        return self.group_size + self.oversample

    @property
    def trained_episodes(self) -> int:
        """Episodes of a group that are trained, at most."""
        return self.keep.episodes or self.group_size
