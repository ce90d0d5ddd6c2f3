"""The agent that plays a user's ``run(data, base_url, api_key, http_client)``: what the gateway records is its episode.

row of the dataset ──> run ──base_url──> gateway ──> Capture ──rows──┐
                        └─reward, dict or None──> Outcome ──────────> Episode
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol

from realsys.data.prompts import Prompt
from realsys.errors import AgentError
from realsys.rollout.agents.base import AgentParts, Session
from realsys.rollout.agents.bounded import EpisodeTime
from realsys.rollout.agents.captured.outcome import Outcome, outcome_of
from realsys.rollout.environments.base import Judgement
from realsys.rollout.task import Task
from realsys.types import Episode


class Runs(Protocol):
    """Caller of a user's ``run``."""

    def __call__(self, data: dict[str, Any], base_url: str, api_key: str, time: EpisodeTime) -> Awaitable[Any]:
        """Return what ``run`` returns. ``time`` starts when ``run`` does."""
        ...

    async def close(self) -> None: ...


class CapturedAgent:
    """Agent with ``base_url``."""

    def __init__(self, parts: AgentParts, runs: Runs) -> None:
        self._parts = parts
        self._runs = runs

    async def run(self, task: Task, session: Session) -> Episode:
        """Play one episode. Raises AgentError, the exceptions of ``run``, and errors of the engine.

        `error-is-not-data`: an agent may hide an error of the engine, or die of it; both are that error.
        """
        time = EpisodeTime(self._parts.config.rollout.agent_limits.episode_timeout_s)
        try:
            returned = await self._runs(data_of(task.prompt), session.base_url, session.api_key, time)
        except Exception as error:
            raise session.capture.error or error from None
        if session.capture.error is not None:
            raise session.capture.error
        outcome = outcome_of(returned)
        rows = session.capture.rows(outcome.rewards)
        if not rows:
            raise AgentError("run received no completion from base_url, so there is nothing to train")
        judgement = await time.bound(self._judgement(task, session, outcome))
        metrics = session.capture.metrics() | judgement.metrics
        return Episode(rows, judgement.reward, judgement.correct, metrics, judgement.answer)

    async def close(self) -> None:
        """End the processes of the agent, and its HTTP client."""
        await self._runs.close()

    async def _judgement(self, task: Task, session: Session, outcome: Outcome) -> Judgement:
        if outcome.reward is not None:
            return Judgement(outcome.reward, outcome.correct, dict(outcome.metrics), answer=outcome.answer)
        judgement = await self._parts.environment.judge(task, session.capture.last())
        correct = judgement.correct if outcome.correct is None else outcome.correct
        answer = judgement.answer if outcome.answer is None else outcome.answer
        return Judgement(judgement.reward, correct, judgement.metrics | outcome.metrics, answer=answer)


def data_of(prompt: Prompt) -> dict[str, Any]:
    """Return the row of the dataset: ``prompt`` is a text, or messages as plain dicts."""
    return {**prompt.extra, "prompt": prompt.messages or prompt.text, "answer": prompt.answer}
