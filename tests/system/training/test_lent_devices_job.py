"""Servers and ranks that use the same devices in turn, in whole runs."""

import time

import pytest

from tests.support.jobs.jobs import arith, running
from tests.support.jobs.ledgers import check_complete

pytestmark = pytest.mark.system

LENT = ["allocation=serve.d1|d1", "train.batch_groups=4", "rollout.group_size=2", "rollout.workers=1"]
STEPS = 6


def test_servers_and_ranks_take_turns(tmp_path):
    root, argv = arith(tmp_path, "turns", *LENT, f"train.total_steps={STEPS}", "evaluation.every_steps=2")
    with running(root, argv) as live:
        job = live.wait()
    check_complete(job, STEPS)
    assert all(record["seconds"]["switch"] >= 0 for record in job.records("train"))
    assert {record["eval_id"] for record in job.records("eval")} == {"before", "step-2", "step-4", "after"}


def own_bytes(pid):
    """Memory of a process that no file backs: its share of what it shares with others."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            rows = dict(line.split(maxsplit=1) for line in file)
    except OSError:  # it has ended
        return 0
    return sum(1024 * int(rows[name].split()[0]) for name in ("Pss_Anon:", "Pss_Shmem:"))


def test_rank_and_server_fit_where_one_of_them_fits(tmp_path):
    """36M parameters. Together they never have 1.3 times of what the larger one needs; both at once would have more."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10}
    model = [f"model.tiny.{name}={value}" for name, value in sizes.items()]
    short = ["warmup.steps=0", "evaluation.problems=0", "checkpoint.at_end=false", "train.total_steps=2"]
    most = [0, 0]  # of the rank, of the server
    together = 0
    with running(*arith(tmp_path, "in-turn", *LENT, *model, *short)) as live:
        pids = [
            live.until(lambda w=worker: live.pid(w), worker) for worker in ("model_worker/0", "generation_server/0")
        ]
        while live.process.poll() is None:
            sizes = [own_bytes(pid) for pid in pids]
            most, together = list(map(max, most, sizes)), max(together, sum(sizes))
            time.sleep(0.02)  # nothing tells when a process takes memory
        live.job.completed()
    limit = 1.3 * max(most)
    assert together <= limit < sum(most), (together, most)
