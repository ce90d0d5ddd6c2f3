"""An environment with steps: rollout.agent=multi_turn rollout.environment=guessing:Guessing

    {"prompt": "guess my number; answer with a number only", "answer": "37"}

Each wrong guess costs a little and gets a hint.
"""

import re

from realsys.rollout.environments import EnvironmentParts, Judgement, Response, Task


class Guessing:
    """Guess the answer of the row, a number below ``limit``."""

    def __init__(self, parts: EnvironmentParts, limit: int = 100, cost: float = 0.1) -> None:
        self._limit = limit  # rollout.environment_args={limit: 20}
        self._cost = cost

    async def reset(self, task: Task) -> str | None:
        task.state["secret"] = int(task.prompt.answer)  # a game with a server would start it here
        return f"it is below {self._limit}"

    async def step(self, task: Task, response: Response) -> Judgement:
        guess = re.search(r"\d{1,9}", response.text)
        if guess is None:
            return Judgement(-self._cost, correct=False, feedback="answer with a number")
        secret, number = task.state["secret"], int(guess[0])
        if number == secret:
            return Judgement(1.0, correct=True, done=True)
        return Judgement(-self._cost, correct=False, feedback="higher" if number < secret else "lower")

    async def close(self, task: Task) -> None:
        task.state.clear()  # and would stop it here
