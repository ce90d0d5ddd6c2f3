"""The longest sequence of a trial: context of the engines, positions of the models, size of a micro-batch."""

from __future__ import annotations

from realsys.config.doors import AGENT
from realsys.config.schema import Config
from realsys.errors import ConfigError


def longest_sequence(config: Config) -> int:
    """Tokens of the longest row that the agent of ``rollout.agent`` can make. Raises ConfigError.

    Context of the engines, positions of the models and size of micro-batches are all judged by it.
    """
    agent, arguments = config.rollout.agent, config.rollout.agent_args
    longest_row = getattr(AGENT.load(agent), "longest_row", None)
    if longest_row is None:
        return config.data.max_prompt_tokens + config.generation.sampling.max_new_tokens
    with AGENT.guard(agent, "longest_row raised"):
        try:
            longest = longest_row(config, **arguments)
        except TypeError as error:
            raise ConfigError("rollout.agent_args", arguments, f"do not fit {agent}: {error}") from None
    if type(longest) is not int or longest < 1:
        raise ConfigError("rollout.agent", agent, f"longest_row must return a number of tokens, not {longest!r}")
    return longest
