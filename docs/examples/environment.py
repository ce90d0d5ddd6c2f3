"""An environment with a reward from a key of the dataset row: rollout.environment=environment:ShortAnswers

    {"prompt": "...", "answer": "7", "budget": 200}

A correct completion gets a bonus for each token that it stays under the row's budget.
"""

from realsys.rollout.environments import EnvironmentParts, Judgement, Response, Task


class ShortAnswers:
    """The verdict of data.verifier, plus a bonus for short completions that are correct."""

    def __init__(self, parts: EnvironmentParts, bonus: float = 1.0) -> None:
        self._verify = parts.verify
        self._reward = parts.config.rollout.reward
        self._bonus = bonus  # rollout.environment_args={bonus: 0.5}

    async def judge(self, task: Task, response: Response) -> Judgement:
        budget = task.prompt.extra["budget"]
        if response.finish_reason != "stop":
            return Judgement(self._reward.wrong, correct=False, metrics={"unused_budget": 0.0})
        verdict = await self._verify(task, response)
        unused = max(0.0, 1.0 - response.tokens / budget)
        if not verdict.correct:
            return Judgement(self._reward.wrong, correct=False, metrics={"unused_budget": unused})
        reward = self._reward.correct + self._bonus * unused
        return Judgement(reward, correct=True, metrics={**verdict.metrics, "unused_budget": unused})
