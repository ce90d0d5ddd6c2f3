"""A whole job in which some completions have no verdict: groups are trained without them, and none has reward 0."""

import pytest

from realsys.train.record_files import read_arrays, read_record, recorded_steps
from tests.support.jobs.jobs import arith, running
from tests.support.jobs.ledgers import check_ledger

pytestmark = pytest.mark.system

#: a verifier that cannot judge one completion in four or so, by its text alone
VERIFIER = """
import zlib


def verify(item):
    if zlib.crc32(item.completion.encode()) % 4 == 0:
        raise RuntimeError("the sandbox is gone")
    return item.completion.partition("#")[2] == item.answer
"""


def test_groups_train_without_undecided_episodes(tmp_path):
    (tmp_path / "picky.py").write_text(VERIFIER)
    settings = [
        "data.verifier=picky:verify",
        "rollout.group_size=4",
        "train.total_steps=3",
        "warmup.steps=60",  # completions that end: one that is cut off is not judged
    ]
    with running(*arith(tmp_path / "runs", "partial", *settings), env={"PYTHONPATH": str(tmp_path)}) as live:
        live.wait()
    job = live.job.completed()
    steps = job.records("train")
    assert [step["version"] for step in steps] == [1, 2, 3]
    assert all(8 <= step["episodes"] <= 32 for step in steps)
    assert sum(step["episodes"] for step in steps) < 3 * 32, "a failed episode was trained"
    assert sum(step["verdict_failures"].get("raised", 0) for step in steps) > 0
    assert "verdict failures" in job.stdout, "the user was not told"
    failed = 0
    for _, folder in recorded_steps(job.paths.records).items():
        record = read_record(folder)
        _, origins = read_arrays(folder, record)
        errors = {origin.ticket.ticket_id: origin.errors for origin in origins}
        for group in record.groups:
            assert len({meta.episode for meta in group}) + len(errors[group[0].ticket_id]) == 4
            failed += len(errors[group[0].ticket_id])
            assert all("the sandbox is gone" in error for error in errors[group[0].ticket_id])
    assert failed > 0
    check_ledger(job, batch_groups=8, eta=4, prompts=400)
