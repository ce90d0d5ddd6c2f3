"""The door ``rollout.agent``: construction of the agent that the configuration names."""

from __future__ import annotations

from realsys.agent_runner.contract import CAPTURED, is_async, kind_of
from realsys.config.doors import AGENT
from realsys.config.schema import Config
from realsys.data.tokenizer import TextTokenizer
from realsys.rollout.agents.captured import AgentProcesses, CapturedAgent, Inside, check_interpreter
from realsys.rollout.agents.contract import Agent, AgentParts, Bounded, ClosableAgent
from realsys.rollout.environments import Environment


def build(config: Config, tokenizer: TextTokenizer, environment: Environment) -> ClosableAgent:
    """Build the agent that ``rollout.agent`` names. Raises ConfigError."""
    rollout, parts = config.rollout, AgentParts(config, tokenizer, environment)
    if rollout.agent_python:
        return CapturedAgent(parts, AgentProcesses(rollout))
    loaded = AGENT.load(rollout.agent)
    if kind_of(loaded)[0] != CAPTURED:
        agent: Agent = AGENT.make(rollout.agent, parts, rollout.agent_args)
        return Bounded(agent, rollout.agent_limits.episode_timeout_s, environment)
    # an async run shares the event loop of the RolloutWorker; another one would block it
    wanted = config.rollout.agent_process
    if wanted == "always" or (wanted == "auto" and not is_async(loaded)):
        return CapturedAgent(parts, AgentProcesses(rollout))
    with AGENT.guard(rollout.agent, "cannot be built"):
        return CapturedAgent(parts, Inside(loaded, rollout))


def check(config: Config, tokenizer: TextTokenizer) -> None:
    """Let the agent check the model's tokenizer before anything starts. Raises ConfigError."""
    rollout = config.rollout
    if rollout.agent_python:
        check_interpreter(rollout)
        return
    check_of_agent = getattr(AGENT.load(rollout.agent), "check", None)
    if check_of_agent is not None:
        with AGENT.guard(rollout.agent, "check raised"):
            check_of_agent(config, tokenizer, **rollout.agent_args)
