"""A whole job over two hosts: each process runs on the node that the plan gave it, and finds its own address."""

import contextlib
import signal
import subprocess
from datetime import datetime

import pytest

from realsys.config.compose import compose
from realsys.config.device_plan import nodes_of, seats_of
from realsys.config.machine import Machine
from realsys.config.paths import TrialPaths
from realsys.launch.prepare import prepare, resolve
from realsys.launch.process_plan import plan
from tests.support.jobs.jobs import BOUND_S, SMALL, Job
from tests.support.jobs.ledgers import check_ledger, check_staleness
from tests.support.processes.netns import Hosts, environment

pytestmark = [pytest.mark.system, pytest.mark.needs("netns")]

SETTINGS = [
    *("allocation=serve.d1+d2", "warmup.steps=2", "train.total_steps=2", "evaluation.problems=4"),
    *("cluster.nodes=2", "cluster.interface=10.77.5.0/24", "cluster.name_store.file_between_hosts=true"),
]


@contextlib.contextmanager
def started(hosts, specs):
    """Start each process on its node; end all of them when the block is left."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for spec in specs:
            argv = hosts.command(int(spec.node.removeprefix("node")), spec.argv)
            with spec.log.open("ab") as log:
                running[spec.name] = subprocess.Popen(argv, env={**environment(), **spec.env}, stdout=log, stderr=log)
        yield running
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        for process in running.values():
            process.wait(BOUND_S)
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def test_planned_job_runs_over_two_hosts(tmp_path):
    config = resolve(compose([*SMALL, *SETTINGS, f"fileroot={tmp_path}", "trial=t"]), now=datetime.now())
    machine, paths = Machine(cpus=2, memory_bytes=64 << 30), TrialPaths.of(config)
    specs = plan(config, paths, seats_of(config, machine, nodes_of(config, machine)), "two-hosts")
    assert {spec.node for spec in specs if spec.kind == "model_worker"} == {"node0", "node1"}
    with Hosts() as hosts, prepare(config, print), started(hosts, specs) as running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            running["master_worker/0"].wait(BOUND_S)
        job = Job(paths.root, running["master_worker/0"].returncode, "", "")
        assert job.returncode == 0, job.report()
    check_ledger(job, batch_groups=8, eta=4, prompts=400)
    check_staleness(job, eta=4)
    logs = (paths.logs / "generation_server-0.log").read_text()
    assert "at http://10.77.5." in logs
