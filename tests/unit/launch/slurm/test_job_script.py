"""The batch script is compared with files: a change of them is a change of every job."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_cluster import ClusterConfig, ContainerConfig, SlurmConfig
from realsys.launch.nodes.orders import EXIT_NO_MACHINE
from realsys.launch.slurm.launcher import Job, SlurmAllocation, guard_command, render, srun_command, steps_as_text

GOLDEN = Path(__file__).parent / "golden"
JOB = Job(
    ["/shared/venv/bin/python", "-m", "realsys.launch.cli", "run", "experiment=math", "data.train=a b.jsonl"],
    Path("/home/me/my work"),
    Path("/shared/runs/math/50% off/job/job-%j.log"),
    {"PYTHONPATH": "/shared/realsys:/home/me/own code"},
)
#: the kinds of clusters
CLUSTERS = {
    "plain": ClusterConfig(
        nodes=4,
        spare_nodes=1,
        gpus_per_node=8,
        slurm=SlurmConfig(partition="gpu", account="a1", time="1-00:00:00", gpu_type="h100"),
    ),
    "modules": ClusterConfig(
        nodes=2,
        cpus_per_node=32,
        memory_gb_per_node=120.5,
        slurm=SlurmConfig(
            exclusive=False,
            requeue=False,
            signal_s=120,
            options=["--reservation=r", "--constraint=ib&a100", "--mail-type=END"],
            setup=["module load cuda/12.8", "source ~/env/bin/activate"],
        ),
    ),
    "two_kinds": ClusterConfig(
        nodes=6,
        cpu_nodes=2,
        spare_nodes=1,
        gpus_per_node=8,
        cpus_per_cpu_node=64,
        slurm=SlurmConfig(
            partition="gpu",
            account="a1",
            time="1-00:00:00",
            options=["--constraint=ib", "--mail-type=END"],
            cpu_partition="cpu",
            cpu_options=["--constraint=amd"],
        ),
    ),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_script_is_that_of_the_file(name: str, tmp_path: Path) -> None:
    text = render(Config(experiment="math", trial="t", cluster=CLUSTERS[name]), JOB)
    assert text == (GOLDEN / f"{name}.sh").read_text("utf-8")
    (tmp_path / "job.sh").write_text(text)
    subprocess.run(["bash", "-n", str(tmp_path / "job.sh")], check=True, timeout=60)


def test_value_with_a_space_is_quoted() -> None:
    slurm = SlurmConfig(options=["--comment=two words", '--licenses="a b"', "--mail-type=END", "--overcommit"])
    text = render(Config(cluster=ClusterConfig(nodes=1, slurm=slurm)), JOB)
    for line in ('--comment="two words"', '--licenses="a b"', "--mail-type=END", "--overcommit"):
        assert f"#SBATCH {line}\n" in text


def run_script(tmp_path: Path, program: str) -> tuple[int, str]:
    """Run a batch script whose run is ``program``, with stand-ins for SLURM; returns its exit code and its requeues."""
    (tmp_path / "job.sh").write_text(
        render(Config(cluster=CLUSTERS["plain"]), Job(["bash", "-c", program], tmp_path, tmp_path / "o"))
    )
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    (tmp_path / "scontrol").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    done = subprocess.run(["bash", str(tmp_path / "job.sh")], env=env, timeout=60, check=False)
    calls = tmp_path / "calls"
    return done.returncode, calls.read_text() if calls.exists() else ""


def test_signal_of_the_time_limit_requeues(tmp_path: Path) -> None:
    """The script passes the signal on, waits for the end of the run, and keeps its code."""
    program = 'trap "sleep 0.1; exit 138" USR1; kill -USR1 $PPID; while :; do sleep 0.01; done'
    assert run_script(tmp_path, program) == (138, "requeue 7\n")


def test_sigterm_reaches_the_run_once(tmp_path: Path) -> None:
    program = 'trap "exit 143" TERM; kill -TERM $PPID; sleep 0.3; exit 5'
    assert run_script(tmp_path, program) == (5, "")


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (2, False), (EXIT_NO_MACHINE, True)])
def test_failure_requeues_only_after_a_lost_node(code: int, requeued: bool, tmp_path: Path) -> None:
    ended, calls = run_script(tmp_path, f"exit {code}")
    assert (ended, calls) == ((138, "requeue 7\n") if requeued else (code, ""))


def srun(container: ContainerConfig, *, keep_script: bool = False) -> list[str]:
    config = Config(cluster=ClusterConfig(nodes=2, spare_nodes=1, slurm=SlurmConfig(srun=["--x"], container=container)))
    command = srun_command(
        config, SlurmAllocation("7", ["a", "b", "c"], cpus=16), ["/lost", "env", "A=b", "python", "agent"], Path("/t%")
    )
    return [word for word in command if keep_script or not word.startswith("#")]


def test_srun_starts_one_agent_per_node() -> None:
    command = srun(ContainerConfig())
    assert {"--nodes=3", "--ntasks=3", "--no-kill", "--kill-on-bad-exit=0", "--cpus-per-task=16", "--x"} < set(command)
    assert "--output=/t%%/agent-%n.log" in command
    assert command[-9:] == ["agent", "/lost", "env", "A=b", "python", "agent", "--once", "--wait", "20"]


def test_apptainer_wraps_the_agent() -> None:
    command = srun(ContainerConfig(image="i.sif", mounts=["/shared", "/a:/b"]))
    wrapped = ["apptainer", "exec", "--nv", "--bind", "/shared,/a:/b", "i.sif"]
    assert command[-14:-7] == ["/lost", *wrapped]


def test_pyxis_takes_options_of_srun() -> None:
    command = srun(ContainerConfig(image="r#i:1", runtime="pyxis", mounts=["/shared"], args=["--container-remap-root"]))
    assert {"--container-image=r#i:1", "--container-mounts=/shared", "--container-remap-root"} < set(command)
    assert "apptainer" not in command


def test_each_component_has_its_own_steps() -> None:
    config = Config(cluster=CLUSTERS["two_kinds"])
    light, heavy = (SlurmAllocation("7", [], cpus, group=group) for group, cpus in enumerate((64, 16)))
    for part, words in ((light, {"--het-group=0", "--nodes=2"}), (heavy, {"--het-group=1", "--nodes=5"})):
        agents = srun_command(config, part, ["/lost", "agent"], Path("/t"))
        assert words | {f"--cpus-per-task={part.cpus}", f"--output=/t/agent-{part.group}.%n.log"} < set(agents)
        assert words < set(guard_command(config, part, Path("/lost")))


def test_dry_run_shows_every_script() -> None:
    config = Config(cluster=ClusterConfig(nodes=2, cpus_per_node=8))
    text = steps_as_text(config, TrialPaths(Path("/r/t")), ["python", "agent"])
    for part in ("srun --job-name=agents", "--cpus-per-task=8", "bash -c agent.sh agent /r/t/job/no-coordinator-JOB-0"):
        assert part in text.splitlines()[0]
    assert "REALSYS_SHIELDED" in text and "scontrol requeue" in text


def run_agent(tmp_path: Path, code: int) -> Path:
    """Run agent.sh with an agent that exits with ``code``, without a program of SLURM; returns its file."""
    file, words = tmp_path / "lost", srun(ContainerConfig(image="r#i:1", runtime="pyxis"), keep_script=True)
    script = words[words.index("-c") + 1]
    (tmp_path / "bin").mkdir()
    command = ["/bin/bash", "-c", script, "agent", str(file), "/bin/bash", "-c", f"exit {code}"]
    env = {"PATH": str(tmp_path / "bin"), "SLURMD_NODENAME": "n1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    return file


@pytest.mark.parametrize(("code", "is_lost"), [(0, False), (1, False), (3, True)])
def test_agent_without_slurm_reports_a_lost_launcher(code: int, is_lost: bool, tmp_path: Path) -> None:
    assert run_agent(tmp_path, code).exists() == is_lost


RUNNING = "JobId=7 HetJobOffset=0 JobState=RUNNING Requeue=1 Restarts=0 BatchFlag=1"
REQUEUED = RUNNING.replace("Restarts=0", "Restarts=1")
PENDING = REQUEUED.replace("RUNNING", "PENDING")
SECOND = f"\n{RUNNING}"  # another component may not have been queued again yet


@pytest.mark.parametrize(
    ("before", "after", "calls"),
    [
        (RUNNING, "", ["scontrol requeue 7"]),
        (RUNNING + SECOND, RUNNING + SECOND, ["scontrol requeue 7", "scancel 7"]),  # --no-requeue
        (RUNNING, PENDING, ["scontrol requeue 7"]),  # another guard was faster
        (PENDING + SECOND, "", []),
        (REQUEUED + SECOND, "", []),
    ],
)
def test_guard_queues_a_job_again_once(before: str, after: str, calls: list[str], tmp_path: Path) -> None:
    """scontrol shows ``before`` until it has refused to queue the job again, then ``after``; "": it does not refuse."""
    (tmp_path / "shown").write_text(f"{before}\n")
    (tmp_path / "after").write_text(f"{after}\n")
    (tmp_path / "calls").touch()
    programs = {
        "scontrol": f"""
            if [ "$1" = --oneliner ]; then exec cat {tmp_path}/shown; fi
            echo scontrol "$@" >> {tmp_path}/calls
            cp {tmp_path}/after {tmp_path}/shown
            exit {int(bool(after))}""",
        "scancel": f"echo scancel $* >> {tmp_path}/calls",
    }
    for program, script in programs.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / program).chmod(0o755)
    command = guard_command(Config(cluster=CLUSTERS["plain"]), SlurmAllocation("7", []), run_agent(tmp_path, 3))
    assert "--container-image" not in " ".join(command) and "--nodes=5" in command
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(command[command.index("bash") :], env=env, timeout=60, check=False)
    assert (tmp_path / "calls").read_text().splitlines() == calls
