"""Two policies that play each other: the one that is trained, and itself some steps ago, pinned.

Both answer the same problem; the trained one is rewarded for being right where its opponent is wrong:

    python self_play.py
"""

from pathlib import Path

import realsys
from realsys.rollout.episodes import RowBuilder
from realsys.types import Episode

SETTINGS = [
    "experiment=arith",
    f"rollout.agent={Path(__file__).resolve()}:Duel",  # RolloutWorkers import this file
    "allocation=serve.d2+d1",  # a server for the pinned version, and one for the newest
]
EVERY = 5  # steps after which the opponent is replaced


class Duel:
    """An episode: one answer of each policy. Only tokens of the trained one are trained."""

    def __init__(self, parts):
        self.parts = parts

    async def run(self, task, session):
        row = RowBuilder(task.prompt.ids)
        answer = await session.generate(row.tokens)
        own = await self.parts.environment.judge(task, self.parts.response(answer))
        row.completion(answer)
        if task.ticket.kind == "eval":
            return Episode([row.row()], own.reward, own.correct)
        other = await session.generate(task.prompt.ids, policy="opponent")
        theirs = await self.parts.environment.judge(task, self.parts.response(other))
        return Episode([row.row()], own.reward - theirs.reward, own.correct, {"opponent": theirs.reward})


def train(session: realsys.Session) -> None:
    session.pin("opponent")
    for step in session.steps():
        batch = session.rollout.prepare_batch()
        if batch is None:
            break
        session.update(batch)
        session.publish()
        if step % EVERY == 0:
            session.pin("opponent")
        session.evaluate_due()


if __name__ == "__main__":
    realsys.main(train, SETTINGS)
