"""Longest sequence of a trial. It limits the engines' context, the models' positions and the micro-batches."""

from __future__ import annotations

from realsys.config.doors import AGENT
from realsys.config.schema import Config, DataConfig
from realsys.errors import ConfigError

DEFAULT_PROMPT = int(DataConfig.model_fields["max_prompt_tokens"].default)


def longest_sequence(config: Config) -> int:
    """Return the tokens of the longest row that the agent of ``rollout.agent`` can make. Raises ConfigError."""
    agent, arguments = config.rollout.agent, config.rollout.agent_args
    # An agent that runs in another interpreter cannot be imported here.
    longest_row = None if config.rollout.agent_python else getattr(AGENT.load(agent), "longest_row", None)
    if longest_row is None:
        shortest = config.data.max_prompt_tokens + config.generation.sampling.max_new_tokens
        return config.rollout.agent_limits.max_tokens or shortest
    with AGENT.guard(agent, "longest_row raised"):
        try:
            longest = longest_row(config, **arguments)
        except TypeError as error:
            raise ConfigError("rollout.agent_args", arguments, f"do not fit {agent}: {error}") from None
    if type(longest) is not int or longest < 1:
        raise ConfigError("rollout.agent", agent, f"longest_row must return a number of tokens, not {longest!r}")
    return longest


def lengths_that_fit(positions: int, prompt: int = DEFAULT_PROMPT) -> tuple[int, int]:
    """Split the positions of a model into (prompt tokens, new tokens): at most a quarter of them for the prompt."""
    prompt = max(1, min(prompt, positions // 4))
    return prompt, max(1, positions - prompt)
