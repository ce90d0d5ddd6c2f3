"""The environments that judge completions. Contract: ``base.py``; names: ``realsys.config.doors``."""

from __future__ import annotations

from typing import Protocol

from realsys.config.doors import ENVIRONMENT
from realsys.config.schema import Config
from realsys.data.tokenizer import TextTokenizer
from realsys.reward.verifiers.base import Item, Verdict
from realsys.rollout.environments.base import Environment, EnvironmentParts
from realsys.rollout.task import Response, Task


class Verifiers(Protocol):
    """The part of VerifierPool that an environment needs."""

    async def verify(self, name: str, item: Item) -> Verdict: ...


def build(config: Config, tokenizer: TextTokenizer, pool: Verifiers) -> Environment:
    """Build the environment that ``rollout.environment`` names. Raises ConfigError."""

    async def verify(task: Task, response: Response) -> Verdict:
        prompt = task.prompt
        item = Item(prompt.text, response.text, prompt.answer, prompt.extra)
        return await pool.verify(config.data.verifier, item)

    parts = EnvironmentParts(config, tokenizer, verify)
    arguments = config.rollout.environment_args
    environment: Environment = ENVIRONMENT.make(config.rollout.environment, parts, arguments)
    return environment
