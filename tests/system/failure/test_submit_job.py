"""A whole job whose training loop submits its prompts (``data.order=script``)."""

import re
from itertools import pairwise

import msgspec
import pytest

from realsys.data.submitted import SubmittedLines
from realsys.manager.ledger.events import Granted
from realsys.manager.ledger.journal import read_journal
from tests.support.jobs.jobs import arith, realsys, running
from tests.system.failure.test_outcomes_job import TINY

pytestmark = pytest.mark.system

SIZE = 20  # prompts of the train split
BATCH = 8
ROW = {"prompt": "a1b2=", "answer": "3"}
# train prompts, rows of the script, other agents, one that cannot be built
FIRST = [*((k, "") for k in (3, 5, 3)), *[(ROW, "")] * 3, (4, "multi_turn"), (1, "no_module:Agent"), (0, "")]
LOOP = f"""
FIRST = {FIRST}
ROWS = [*FIRST, *[({ROW}, "single_turn")] * {2 * BATCH}]


def train(session):
    for step in session.steps():
        for row, agent in ROWS[session.rollout.submitted : len(FIRST) if step == 1 else len(ROWS)]:
            session.rollout.submit(row, agent)
        session.update(session.rollout.prepare_batch())
        session.publish()
"""


def submitted(line):
    """Return what the script has submitted: (row, agent)."""
    return msgspec.json.decode(line.row), line.agent


def test_submitted_prompts_are_trained_though_the_trainer_dies(tmp_path):
    """In their order; a new trainer goes on with the sequence. One row whose agent does not exist is dropped."""
    (tmp_path / "loop.py").write_text(LOOP, "utf-8")
    overrides = ["data.order=script", f"train.loop={tmp_path / 'loop.py'}", "train.total_steps=3"]
    with running(*arith(tmp_path, "script", *TINY, *overrides, "checkpoint.every_steps=1")) as live:
        live.until_step(1)
        live.kill("model_worker/0")
        job = live.wait().completed()
    assert [step["step"] for step in job.records("train")][-2:] == [2, 3]
    events = [event for event, _ in read_journal(job.paths.ledger)]
    new = [event.prompt_index for event in events if isinstance(event, Granted) and event.position >= 0]
    lines = SubmittedLines(job.paths.submitted)
    rows = [(number, "") if number < SIZE else submitted(lines.read(number - SIZE)) for number in new]
    # numbers may be left out: a loop that ends between both writes leaves a line that no ledger knows
    assert rows == [*FIRST, *[(ROW, "single_turn")] * (2 * BATCH)]
    assert all(one < other for one, other in pairwise(number for number in new if number >= SIZE))
    audit = realsys("audit", job.root)
    assert audit.returncode == 0 and "every check holds" in audit.stdout, audit.stdout
    assert re.search(rf"trained +{3 * BATCH} .*\n *dropped +1  failed DataError 1", audit.stdout), audit.stdout
    reasons = {event.reason for event in events if getattr(event, "outcome", "") == "failed"}
    assert len(reasons) == 1 and "agent 'no_module:Agent' of the row: no module named 'no_module'" in reasons.pop()
