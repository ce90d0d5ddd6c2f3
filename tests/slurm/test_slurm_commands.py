"""`realsys submit` and `stop` of jobs without a run: refused, waiting, on nodes without the requested GPUs."""

from pathlib import Path

import pytest

from tests.support.slurm.cluster import NODES
from tests.support.slurm.trials import FREED_S, SlurmTrial, realsys

pytestmark = [pytest.mark.needs(program) for program in ("slurmctld", "slurmd", "etcd")]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("partition", ["cluster.nodes=1"]),
        ("cpu_partition", ["cluster.nodes=2", "cluster.cpu_nodes=1", "cluster.slurm.partition=main"]),
    ],
)
def test_unknown_partition_is_one_line(field, words, slurm, tmp_path):
    trial = SlurmTrial(slurm, tmp_path, "refused", *words, f"cluster.slurm.{field}=nope")
    done = realsys("submit", *trial.words)
    assert done.returncode == 2 and not trial.root.exists()
    [line] = done.stderr.splitlines()
    assert f"cluster.slurm.{field}='nope'" in line and "(partitions: cpu, main)" in line


def test_waiting_job_shows_its_reason_and_stops(slurm, tmp_path):
    slurm.call("sbatch", f"--nodes={NODES}", "--exclusive", "--output=/dev/null", "--wrap=sleep 300")
    trial = SlurmTrial(slurm, tmp_path, "waiting", "cluster.nodes=2")
    trial.submit()
    slurm.until(lambda: "Resources" in realsys("status", str(trial.root)).stdout, "the reason")
    again = realsys("submit", *trial.words)
    assert again.returncode == 2 and f"job {trial.job} is pending" in again.stderr
    assert "pending" in realsys("list", str(tmp_path)).stdout
    assert "is cancelled" in realsys("stop", str(trial.root)).stdout
    trial.until_state("CANCELLED")


#: for launcher, agents and workers, whether these are executed or forked
SITECUSTOMIZE = """
import os, sys
words = " ".join(sys.orig_argv)
if "realsys.workers" in words or "realsys.launch.cli" in words:
    import realsys.cluster.worker as worker
    import realsys.config.machine as machine
    machine._present_gpus = lambda: 2
    start = worker.worker_main

    def shown(kind, body, argv=None):
        name = kind + "/" + sys.argv[sys.argv.index("--index") + 1]
        with open(os.environ["SHOWN"], "a") as file:
            file.write(f"{name} {os.environ['SLURMD_NODENAME']} {os.environ.get('CUDA_VISIBLE_DEVICES')}\\n")
        start(kind, body, argv)

    worker.worker_main = shown
"""


def test_ranks_see_the_gpus_of_the_plan(slurm, tmp_path):
    """The devices are /dev/null for SLURM, and counted by a stand-in. No rank can use one, so the run ends.

    The job is heterogeneous. On its light node the stand-in counts GPUs, too: the node gets none of their users.
    """
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    shown = tmp_path / "shown.txt"
    gpus = (
        "cluster.nodes=3",
        "cluster.cpu_nodes=1",
        "cluster.slurm.cpu_partition=cpu",
        "cluster.gpus_per_node=2",
        "allocation=serve.d2+d2",
        "model.small_on_gpu=true",
    )
    trial = SlurmTrial(slurm, tmp_path, "gpus", *gpus)
    trial.submit(env={"PYTHONPATH": f"{Path.cwd()}:{tmp_path}", "SHOWN": str(shown)})
    trial.until_state("FAILED")
    seen = {line.split()[0]: line.split()[1:] for line in shown.read_text().splitlines()}
    ranks = [tuple(seen[f"model_worker/{index}"]) for index in range(2)]
    servers = [tuple(seen[f"generation_server/{index}"]) for index in range(2)]
    assert len({*ranks, *servers}) == 4 and {gpu for _, gpu in (*ranks, *servers)} == {"0", "1"}, trial.report()
    others = [seen[name] for name in ("gserver_manager/0", "rollout_worker/0")]
    assert all(len(each) == 1 for each in others), "a process without a GPU sees none"
    assert {node for [node] in others}.isdisjoint(node for node, _ in (*ranks, *servers)), trial.report()
    assert trial.freed_s() < FREED_S


def test_node_without_requested_gpus_is_refused(slurm, tmp_path):
    trial = SlurmTrial(slurm, tmp_path, "none", "cluster.nodes=1", "cluster.gpus_per_node=2")
    followed = realsys("submit", *trial.words)
    assert followed.returncode == 2, "the exit code of the run"
    for text in ("runs on vn", "its processes need 2 GPUs, 0 are there", "has ended: failed, exit code 2"):
        assert text in followed.stdout
