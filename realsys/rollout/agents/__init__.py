"""The door ``rollout.agent``: construction of the agent that the configuration names."""

from __future__ import annotations

from realsys.config.doors import AGENT
from realsys.config.schema import Config
from realsys.data.tokenizer import TextTokenizer
from realsys.rollout.agents.base import Agent, AgentParts
from realsys.rollout.environments.base import Environment


def build(config: Config, tokenizer: TextTokenizer, environment: Environment) -> Agent:
    """Build the agent that ``rollout.agent`` names. Raises ConfigError."""
    parts = AgentParts(config, tokenizer, environment)
    agent: Agent = AGENT.make(config.rollout.agent, parts, config.rollout.agent_args)
    return agent


def check(config: Config, tokenizer: TextTokenizer) -> None:
    """Let the agent check the model's tokenizer before anything starts. Raises ConfigError."""
    check_of_agent = getattr(AGENT.load(config.rollout.agent), "check", None)
    if check_of_agent is not None:
        with AGENT.guard(config.rollout.agent, "check raised"):
            check_of_agent(config, tokenizer, **config.rollout.agent_args)
