"""Configuration of a user's agent: where it runs, and the bounds on its episodes (docs/agents.md)."""

from __future__ import annotations

from pydantic import Field

from realsys.config.fields import NonNegative, Positive, PositiveFloat, Section


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
