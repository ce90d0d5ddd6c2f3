"""The environments that judge completions. Contract: ``base.py``; names: ``realsys.config.doors``."""

from __future__ import annotations

from typing import Protocol

from realsys.config.doors import ENVIRONMENT
from realsys.config.evaluation_sets import evaluation_sets
from realsys.config.schema import Config
from realsys.data.tokenizer import TextTokenizer
from realsys.observe.spans import span
from realsys.reward.verifiers.contract import Item, Verdict
from realsys.rollout.environments.base import Environment, EnvironmentParts
from realsys.rollout.task import Response, Task


class Verifiers(Protocol):
    """The part of VerifierPool that an environment needs."""

    async def verify(self, name: str, item: Item) -> Verdict: ...


def build(config: Config, tokenizer: TextTokenizer, pool: Verifiers) -> Environment:
    """Build the environment that ``rollout.environment`` names. Raises ConfigError."""
    of_sets = {name: made.verifier for name, made in evaluation_sets(config).items()}

    async def verify(task: Task, response: Response) -> Verdict:
        prompt = task.prompt
        item = Item(prompt.text, response.text, prompt.answer, prompt.extra)
        with span("reward", task.unit):
            return await pool.verify(of_sets.get(task.ticket.set, config.data.verifier), item)

    parts = EnvironmentParts(config, tokenizer, verify)
    arguments = config.rollout.environment_args
    environment: Environment = ENVIRONMENT.make(config.rollout.environment, parts, arguments)
    return environment
