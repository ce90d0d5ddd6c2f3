"""The section ``rollout`` of the configuration: agents, their endpoint, choice of episodes, rewards and the judge."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from realsys.config.fields import NonNegative, Positive, PositiveFloat, Probability, Section, pattern

MOST_CRITERIA = 24  # a verdict has a metric for each, and may have 32


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
    blocking_s: PositiveFloat = Field(
        10.0, description="seconds for which an async run in the RolloutWorker may block it; longer: the episode fails"
    )
    tool_s: PositiveFloat = Field(30.0, description="seconds that the built-in tools of one episode may take together")
    memory_mb: Positive = Field(
        2048, description="MiB that an episode in a process may allocate; all of its processes together twice as much"
    )
    processes: Positive = Field(64, description="processes that an episode in a process may start at a time")


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


# ---- rewards, and the judge of data.verifier=judge (docs/rewards.md)


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
    judge: JudgeConfig = JudgeConfig()


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
        description="single_turn, multi_turn, tool_use, verifiers, or package.module:name of a class or function",
    )
    agent_args: dict[str, Any] = Field({}, description="keyword arguments of the agent")
    agent_process: Literal["auto", "always", "never"] = Field(
        "auto",
        description="run each episode of an agent with base_url in a process of its own; auto: if its run is not async",
    )
    agent_python: str = Field(
        "", description="interpreter for an agent with base_url, which needs no realsys there; empty: that of realsys"
    )
    agent_processes: Positive = Field(
        128, description="episodes that one RolloutWorker runs in processes at a time; further ones wait"
    )
    agent_limits: AgentLimitsConfig = AgentLimitsConfig()
    environment: str = Field("verifier", description="verifier, or package.module:Class")
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
