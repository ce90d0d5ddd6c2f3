"""A whole job whose prompts are submitted from outside, as a training script does it (``data.order=script``)."""

import asyncio
import json
import re
import urllib.error
import urllib.request

import pytest

from realsys.config.paths import read_config
from realsys.data.submitted import SubmittedWriter
from realsys.manager.client import ManagerClient
from realsys.manager.ledger.events import Granted
from realsys.manager.ledger.journal import read_journal
from realsys.manager.messages import SubmitRequest
from tests.support.jobs.jobs import arith, realsys, running
from tests.system.failure.test_outcomes_job import TINY

pytestmark = pytest.mark.system

SIZE = 20  # prompts of the train split
ROW = {"prompt": "a1b2=", "answer": "3"}
#: train prompts, rows of the script, other agents, one that cannot be built
FIRST = [*((k, "") for k in (3, 5, 3)), *[(ROW, "")] * 3, (4, "multi_turn"), (1, "no_module:Agent"), (0, "")]
BATCH = 8


class Script:
    """What a training script tells the manager of a live job."""

    def __init__(self, live):
        self.live = live
        self.url = live.until(lambda: re.search(r"http://127\.0\.0\.1:\d+", live.job.stdout), "the page")[0]
        self.token = live.job.paths.token.read_text().strip()
        self.trainer = ""
        self.numbers: list[int] = []  # of all prompts that were submitted

    def wants_more(self):
        """Return True if nothing is left to grant, or the job is over."""
        if self.live.process.poll() is not None:
            return True
        try:
            with urllib.request.urlopen(self.url + "/status", timeout=60) as reply:
                status = json.load(reply)
        except (urllib.error.URLError, ConnectionError):
            return False
        self.trainer = status["ledger"]["trainer_incarnation"]
        return status["admission"]["reason"] == "nothing_submitted"

    def submit(self, numbers):
        async def calls():
            client = ManagerClient(lambda: self.url, self.token)
            start = (await client.submit(SubmitRequest(self.trainer))).total
            totals = {(await client.submit(SubmitRequest(self.trainer, start, numbers))).total for _ in range(2)}
            await client.close()
            return start, totals

        assert asyncio.run(calls()) == (len(self.numbers), {len(self.numbers) + len(numbers)})
        self.numbers += numbers


def test_submitted_prompts_are_trained_though_the_trainer_dies(tmp_path):
    """In their order; a new trainer goes on with the sequence. One row whose agent does not exist is dropped."""
    overrides = ["data.order=script", "train.total_steps=3", "checkpoint.every_steps=1"]
    with running(*arith(tmp_path, "script", *TINY, *overrides)) as live:
        script = Script(live)
        live.until(script.wants_more, "the trainer waits for prompts")
        data = read_config(live.job.paths.config).data
        with SubmittedWriter(live.job.paths.submitted, data, SIZE) as rows:
            script.submit(rows.append(FIRST))
            live.until_step(1)
            before = script.trainer
            live.kill("model_worker/0")
            live.until(lambda: script.wants_more() and script.trainer != before, "a new trainer waits for prompts")
            script.submit(rows.append([(ROW, "single_turn")] * (2 * BATCH)))
        job = live.wait().completed()
    assert [step["step"] for step in job.records("train")] == [1, 2, 3]
    events = [event for event, _ in read_journal(job.paths.ledger)]
    new = [event.prompt_index for event in events if isinstance(event, Granted) and event.position >= 0]
    assert new == script.numbers == [3, 5, 3, 20, 21, 22, 23, 24, 0, *range(25, 25 + 2 * BATCH)]
    audit = realsys("audit", job.root)
    assert audit.returncode == 0 and "every check holds" in audit.stdout, audit.stdout
    assert re.search(rf"trained +{3 * BATCH} .*\n *dropped +1  failed DataError 1", audit.stdout), audit.stdout
    reasons = {event.reason for event in events if getattr(event, "outcome", "") == "failed"}
    assert len(reasons) == 1 and "agent 'no_module:Agent' of the row: no module named 'no_module'" in reasons.pop()
