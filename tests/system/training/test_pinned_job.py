"""Two policies play each other in a whole run: one is trained, one is pinned to an older version."""

import asyncio

import pytest

from realsys.errors import StreamError
from realsys.manager.client import ManagerClient
from realsys.manager.messages import PinRequest
from tests.support.jobs.jobs import arith, running
from tests.support.jobs.ledgers import check_complete

pytestmark = pytest.mark.system

STEPS = 8
SETTINGS = [
    "allocation=serve.d2+d1",
    "rollout.agent=alternating:Alternating",
    "rollout.workers=1",
    "rollout.group_size=2",
    "train.batch_groups=4",
    f"train.total_steps={STEPS}",
    "warmup.steps=2",
    "evaluation.problems=0",
    "checkpoint.every_steps=2",
    "generation.embedded.context_length=320",
]
#: fails if a token of the opponent would be trained
ALTERNATING = """
from realsys.rollout.episodes import RowBuilder
from realsys.types import Episode

class Alternating:
    def __init__(self, parts):
        self.parts = parts

    @staticmethod
    def longest_row(config):
        return config.data.max_prompt_tokens + 4 * config.generation.sampling.max_new_tokens

    async def run(self, task, session):
        row, own, versions = RowBuilder(task.prompt.ids), 0, []
        for number in range(4):
            if number % 2:
                theirs = await session.generate(row.tokens, policy="opponent")  # waits for the first pin
                versions += theirs.versions.tolist()
                row.completion(theirs)
            else:
                mine = await session.generate(row.tokens)
                own += len(mine.tokens)
                row.completion(mine)
        assert row.row().loss_mask.sum() == own
        judgement = await self.parts.environment.judge(task, self.parts.response(mine))
        metrics = {"opponent_oldest": float(min(versions)), "opponent_newest": float(max(versions))}
        return Episode([row.row()], judgement.reward, judgement.correct, metrics)
"""


def pin(live):
    """Pin the newest version as the trainer does; None while the run is not that far."""
    incarnation = live.status().get("ledger", {}).get("trainer_incarnation")
    return asyncio.run(_pin(live, PinRequest("opponent", incarnation))) if incarnation else None


async def _pin(live, request):
    client = ManagerClient(lambda: live.page, live.job.paths.token.read_text().strip())
    try:
        return await client.pin(request)
    except StreamError:  # no version is published yet
        return None
    finally:
        await client.close()


def test_pinned_opponent_outlives_server_trainer_and_manager(tmp_path):
    """Every completion of the opponent is of the pinned version, and none of its tokens is trained."""
    (tmp_path / "alternating.py").write_text(ALTERNATING)
    with running(*arith(tmp_path, "pinned", *SETTINGS), {"PYTHONPATH": str(tmp_path)}) as live:
        version = live.until(lambda: pin(live), "a version is pinned").version
        live.until_step(2)
        [server] = live.until(lambda: live.status()["pins"]["opponent"]["servers"], "a server has the version")
        live.kill(server)
        live.until_step(4)
        live.kill("master_worker/0")
        live.until(lambda: live.job.records("recovered"), "training resumes")
        assert live.status()["pins"]["opponent"]["version"] == version
        live.kill("gserver_manager/0")
        job = live.wait()
    check_complete(job, STEPS)
    for step in job.records("train"):
        assert step["metrics"]["opponent_oldest"] == step["metrics"]["opponent_newest"] == version, step
