"""An agent that thinks first: one call for a thought, a second call for the answer after it.

    PYTHONPATH=docs/examples realsys run experiment=math rollout.agent=agent:ThinkThenAnswer

Only the cue is tokenised. Thought and answer stay as they were sampled, and both are trained.
"""

from realsys.rollout.episodes import RowBuilder
from realsys.types import Episode


class ThinkThenAnswer:
    def __init__(self, parts, cue=" The answer is "):
        self.parts = parts
        self.cue = parts.tokenizer.encode_text(cue)

    @staticmethod
    def longest_row(config, cue=" The answer is "):
        return config.data.max_prompt_tokens + 2 * config.generation.sampling.max_new_tokens + len(cue.encode())

    async def run(self, task, session):
        row = RowBuilder(task.prompt.ids)
        thought = await session.generate(row.tokens)
        row.completion(thought)
        row.context(self.cue)
        answer = await session.generate(row.tokens)
        row.completion(answer)
        judgement = await self.parts.environment.judge(task, self.parts.response(answer, turn=1))
        metrics = judgement.metrics | {"thought_tokens": len(thought.tokens)}
        return Episode([row.row()], judgement.reward, judgement.correct, metrics)
