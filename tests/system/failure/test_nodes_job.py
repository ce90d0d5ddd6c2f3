"""A whole job whose processes are started by two agents: the launcher only coordinates."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from tests.support.jobs.jobs import BOUND_S, arith, processes_of, running
from tests.support.jobs.ledgers import check_ledger
from tests.support.processes.agents import start_agent

pytestmark = pytest.mark.system

#: the command, with ModelWorkers and RolloutWorkers on node b, and all others on node a
DRIVER = """
import sys
from dataclasses import replace
import realsys.launch.run
from realsys.launch.cli import main
from realsys.launch.plan import plan

def on_two_nodes(*given):
    on_b = ("model_worker", "rollout_worker")
    return [replace(spec, node="b" if spec.kind in on_b else "a") for spec in plan(*given)]

realsys.launch.run.plan = on_two_nodes
sys.exit(main(sys.argv[1:]))
"""


def test_job_on_two_agents_is_done_and_audited(tmp_path: Path) -> None:
    root, argv = arith(tmp_path, "nodes", "train.total_steps=2", "evaluation.problems=0")
    argv = [sys.executable, "-c", DRIVER, *argv[argv.index("run") :]]
    outputs = {node: tmp_path / f"{node}.txt" for node in "ab"}
    agents = [start_agent(root, node, output) for node, output in outputs.items()]
    try:
        with running(root, argv) as live:
            live.until_step(1)
            kinds = [
                {argument for child in psutil.Process(agent.pid).children() for argument in child.cmdline()[3:4]}
                for agent in agents
            ]
            live.wait(BOUND_S)
        job = live.job.completed()
        codes = [agent.wait(BOUND_S) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait(BOUND_S)
    assert kinds[0] == {f"realsys.workers.{kind}" for kind in ("gserver_manager", "generation_server", "master_worker")}
    assert kinds[1] == {f"realsys.workers.{kind}" for kind in ("model_worker", "rollout_worker")}
    assert codes == [0, 0], [output.read_text() for output in outputs.values()]
    assert "waiting for the agents of a, b (realsys node-agent)" in job.stdout
    ledger = check_ledger(job, batch_groups=8, eta=4, prompts=400)
    assert ledger.counts.trained == 16 and not ledger.open
    assert not list(job.paths.errors.glob("*")) and not processes_of(root)
