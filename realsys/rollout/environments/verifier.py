"""The environment ``verifier``: its judgement is the verdict of ``data.verifier``."""

from __future__ import annotations

from realsys.rollout.environments.base import EnvironmentParts, Judgement
from realsys.rollout.task import Response, Task


class VerifierEnvironment:
    """Environment that verifies each finished completion; one that was cut off is wrong without a verdict."""

    def __init__(self, parts: EnvironmentParts) -> None:
        self._verify = parts.verify
        self._reward = parts.config.rollout.reward

    async def judge(self, task: Task, response: Response) -> Judgement:
        """Take the verifier's reward; if it has none, rollout.reward.correct or .wrong. Add its bonus.

        Raises RewardError.
        """
        if response.finish_reason != "stop":
            return Judgement(self._reward.wrong, correct=False)
        verdict = await self._verify(task, response)
        reward = verdict.reward
        if reward is None:
            reward = self._reward.correct if verdict.correct else self._reward.wrong
        return Judgement(reward + verdict.bonus, verdict.correct, verdict.metrics, answer=verdict.answer)
