"""The agent ``verifiers``: the environment server plays the episode of a task, its tokens come from the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from realsys.config.schema import Config
from realsys.data.sources.verifiers_tasks import KEY, interpreter
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import AgentError, ConfigError, DataError
from realsys.rollout.agents.base import AgentParts, Session
from realsys.rollout.agents.verifiers.server import Environment, EnvironmentServer
from realsys.rollout.agents.verifiers.wire import client_of, run_request
from realsys.rollout.task import Task
from realsys.types import Episode

CLIENTS = ("chat", "tokens")
MODEL = "policy"  # name of the model in requests, as the gateway lists it
MOST_ENVIRONMENTS = 16  # servers of one RolloutWorker


@dataclass(kw_only=True)
class Options:
    """``rollout.agent_args``.

    env_python  interpreter that has verifiers; default: that of data.source_args
    client      ``chat``: the gateway renders messages; ``tokens``: verifiers does, with ``renderer``
    workers     processes of one environment server
    """

    env_python: str = ""
    client: str = "chat"
    renderer: Mapping[str, Any] | None = None
    workers: int = 1
    start_timeout_s: float = 300.0

    def python(self, config: Config) -> str:
        """Return the interpreter. Raises ConfigError if it is not found, or if another option is out of bounds."""
        field = "rollout.agent_args"
        if self.client not in CLIENTS:
            raise ConfigError(f"{field}.client", self.client, f"must be one of {', '.join(CLIENTS)}")
        if self.renderer and self.client != "tokens":
            raise ConfigError(f"{field}.renderer", dict(self.renderer), "needs client: tokens")
        if type(self.workers) is not int or not 1 <= self.workers <= 64:
            raise ConfigError(f"{field}.workers", self.workers, "must be an integer from 1 to 64")
        if not self.start_timeout_s > 0:
            raise ConfigError(f"{field}.start_timeout_s", self.start_timeout_s, "must be greater than 0")
        sources = [config.data.source_args, *(source.source_args for source in config.data.mixture)]
        of_data = next((args["env_python"] for args in sources if "env_python" in args), "")
        try:
            return interpreter(self.env_python or of_data)
        except DataError as error:
            raise ConfigError(f"{field}.env_python", self.env_python, str(error)) from None


@dataclass
class VerifiersAgent(Options):
    """Player of the tasks of ``data.train=verifiers:ENV``; one server for each environment in the data."""

    parts: AgentParts

    def __post_init__(self) -> None:
        """Check the options. Raises ConfigError."""
        self._python = self.python(self.parts.config)
        self._servers: dict[str, EnvironmentServer] = {}

    @staticmethod
    def check(config: Config, tokenizer: TextTokenizer, **options: Any) -> None:
        """Raise ConfigError for an option out of bounds, or an interpreter that does not exist."""
        Options(**options).python(config)

    async def run(self, task: Task, session: Session) -> Episode:
        """Play one episode. Raises AgentError if the environment failed or timed out: that is never a reward."""
        given = task.prompt.extra.get(KEY)
        if not isinstance(given, dict) or not isinstance(given.get("task"), dict):
            raise AgentError(f"the row has no key {KEY!r}: the agent verifiers plays tasks of data.train=verifiers:ENV")
        server = self._server(given["env"], given.get("args") or {})
        client = client_of(self.client, session.base_url, str(self.parts.tokenizer.path), self.renderer)
        outcome = await server.run(run_request(given["task"], client, MODEL))
        session.capture.exclude(outcome.ignored)
        rows = session.capture.rows()
        if not rows:
            raise AgentError("the environment called no model, so there is nothing to train")
        return Episode(rows, outcome.reward, None, {**session.capture.metrics(), **outcome.metrics})

    async def close(self) -> None:
        """End all servers."""
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    def _server(self, env: str, args: Mapping[str, Any]) -> EnvironmentServer:
        key = json.dumps([env, args], sort_keys=True)
        if key not in self._servers:
            if len(self._servers) >= MOST_ENVIRONMENTS:
                raise AgentError(f"the data names more than {MOST_ENVIRONMENTS} environments: train on fewer of them")
            environment = Environment(env, args, self._python, self.workers, self.start_timeout_s)
            self._servers[key] = EnvironmentServer(environment)
        return self._servers[key]
