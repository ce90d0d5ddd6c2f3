"""The door ``rollout.agent``: construction of the agent that the configuration names, and of those that rows name."""

from __future__ import annotations

import asyncio

from realsys.agent_runner.contract import CAPTURED, is_async, kind_of
from realsys.config.doors import AGENT
from realsys.config.schema import Config
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import ConfigError, DataError
from realsys.rollout.agents.captured import AgentProcesses, CapturedAgent, Inside, check_interpreter
from realsys.rollout.agents.contract import Agent, AgentParts, Bounded, ClosableAgent, Session
from realsys.rollout.environments import Environment, Task
from realsys.types import Episode

MOST_AGENTS = 64  # agents that the rows of one RolloutWorker name; each stays, some with processes


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


# ---- agents that rows name in place of ``rollout.agent`` (``data.order=script``)


class AgentsOfRows:
    """The trial's agent, and the agents that rows name: each is built for its first row, and kept.

    Only ``rollout.agent`` gets ``rollout.agent_args``. An agent that cannot be built costs its rows, and no other.
    """

    def __init__(self, config: Config, tokenizer: TextTokenizer, environment: Environment) -> None:
        """Build the trial's agent. Raises ConfigError."""
        self._config = config
        self._tokenizer = tokenizer
        self._environment = environment
        self._agent = build(config, tokenizer, environment)
        self._named: dict[str, asyncio.Task[ClosableAgent | str]] = {}  # the agent, or why it cannot be built

    async def run(self, task: Task, session: Session) -> Episode:
        """Play one episode. Raises DataError if the agent of its row cannot be built, and what the agent raises."""
        return await (await self._of(task.prompt.agent)).run(task, session)

    async def close(self) -> None:
        """Close all agents."""
        await self._agent.close()
        for building in self._named.values():
            if building.done() and not isinstance(named := building.result(), str):
                await named.close()

    async def _of(self, name: str) -> ClosableAgent:
        if name in ("", self._config.rollout.agent):
            return self._agent
        if name not in self._named:
            if len(self._named) >= MOST_AGENTS:
                raise DataError(f"agent {name!r} of the row: rows have named {MOST_AGENTS} others, which is the most")
            # in a thread, because an import may take seconds
            building = asyncio.to_thread(self._built, name)
            self._named[name] = asyncio.create_task(building, name=f"build agent {name}")
        named = await asyncio.shield(self._named[name])  # other episodes wait for it, too
        if isinstance(named, str):
            raise DataError(f"agent {name!r} of the row: {named}")
        return named

    def _built(self, name: str) -> ClosableAgent | str:
        changes: dict[str, object] = {"agent": name, "agent_args": {}}
        if name in AGENT.builtin:
            changes["agent_python"] = ""
        config = self._config.model_copy(update={"rollout": self._config.rollout.model_copy(update=changes)})
        try:
            check(config, self._tokenizer)
            return build(config, self._tokenizer, self._environment)
        except ConfigError as error:
            return error.problem
