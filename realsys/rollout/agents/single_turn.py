"""The agent ``single_turn``: one prompt, one completion, one judgement."""

from __future__ import annotations

from realsys.config.schema import Config
from realsys.rollout.agents.contract import AgentParts, Session
from realsys.rollout.environments import Task
from realsys.rollout.episodes import RowBuilder
from realsys.types import Episode


class SingleTurn:
    """Agent with one completion per episode."""

    one_turn = True

    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts

    @staticmethod
    def longest_row(config: Config) -> int:
        """Return the tokens of the longest prompt with the longest completion."""
        return config.data.max_prompt_tokens + config.generation.sampling.max_new_tokens

    async def run(self, task: Task, session: Session) -> Episode:
        """Sample one completion and let the environment judge it."""
        row = RowBuilder(task.prompt.ids)
        completion = await session.generate(row.tokens)
        row.completion(completion)
        judgement = await self._parts.environment.judge(task, self._parts.response(completion))
        return Episode([row.row()], judgement.reward, judgement.correct, judgement.metrics, judgement.answer)
