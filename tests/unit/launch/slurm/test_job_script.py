"""The batch script is compared with files: a change of them is a change of every job."""

import contextlib
import subprocess
from pathlib import Path

import pytest

from realsys.config.compose import compose
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_cluster import ClusterConfig, ContainerConfig, SlurmConfig
from realsys.errors import ConfigError
from realsys.launch.nodes.orders import EXIT_NO_MACHINE
from realsys.launch.slurm.client import JobState, JobWatch
from realsys.launch.slurm.launcher import (
    Job,
    SlurmAllocation,
    check_network,
    check_slurm,
    expand,
    guard_command,
    render,
    seconds_of,
    srun_command,
    steps_as_text,
)

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
def test_script_is_that_of_the_file(name, tmp_path):
    text = render(Config(experiment="math", trial="t", cluster=CLUSTERS[name]), JOB)
    assert text == (GOLDEN / f"{name}.sh").read_text("utf-8")
    (tmp_path / "job.sh").write_text(text)
    subprocess.run(["bash", "-n", str(tmp_path / "job.sh")], check=True, timeout=60)


def test_value_with_a_space_is_quoted():
    slurm = SlurmConfig(options=["--comment=two words", '--licenses="a b"', "--mail-type=END", "--overcommit"])
    text = render(Config(cluster=ClusterConfig(nodes=1, slurm=slurm)), JOB)
    for line in ('--comment="two words"', '--licenses="a b"', "--mail-type=END", "--overcommit"):
        assert f"#SBATCH {line}\n" in text


def run_script(tmp_path, program):
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


def test_signal_of_the_time_limit_requeues(tmp_path):
    """The script passes the signal on, waits for the end of the run, and keeps its code."""
    program = 'trap "sleep 0.1; exit 138" USR1; kill -USR1 $PPID; while :; do sleep 0.01; done'
    assert run_script(tmp_path, program) == (138, "requeue 7\n")


def test_sigterm_reaches_the_run_once(tmp_path):
    program = 'trap "exit 143" TERM; kill -TERM $PPID; sleep 0.3; exit 5'
    assert run_script(tmp_path, program) == (5, "")


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (2, False), (EXIT_NO_MACHINE, True)])
def test_failure_requeues_only_after_a_lost_node(code, requeued, tmp_path):
    ended, calls = run_script(tmp_path, f"exit {code}")
    assert (ended, calls) == ((138, "requeue 7\n") if requeued else (code, ""))


def srun(container, *, keep_script=False):
    config = Config(cluster=ClusterConfig(nodes=2, spare_nodes=1, slurm=SlurmConfig(srun=["--x"], container=container)))
    command = srun_command(
        config, SlurmAllocation("7", ["a", "b", "c"], cpus=16), ["/lost", "env", "A=b", "python", "agent"], Path("/t%")
    )
    return [word for word in command if keep_script or not word.startswith("#")]


def test_srun_starts_one_agent_per_node():
    command = srun(ContainerConfig())
    assert {"--nodes=3", "--ntasks=3", "--no-kill", "--kill-on-bad-exit=0", "--cpus-per-task=16", "--x"} < set(command)
    assert "--output=/t%%/agent-%n.log" in command
    assert command[-9:] == ["agent", "/lost", "env", "A=b", "python", "agent", "--once", "--wait", "20"]


def test_apptainer_wraps_the_agent():
    command = srun(ContainerConfig(image="i.sif", mounts=["/shared", "/a:/b"]))
    wrapped = ["apptainer", "exec", "--nv", "--bind", "/shared,/a:/b", "i.sif"]
    assert command[-14:-7] == ["/lost", *wrapped]


def test_pyxis_takes_options_of_srun():
    command = srun(ContainerConfig(image="r#i:1", runtime="pyxis", mounts=["/shared"], args=["--container-remap-root"]))
    assert {"--container-image=r#i:1", "--container-mounts=/shared", "--container-remap-root"} < set(command)
    assert "apptainer" not in command


def test_each_component_has_its_own_steps():
    config = Config(cluster=CLUSTERS["two_kinds"])
    light, heavy = (SlurmAllocation("7", [], cpus, group=group) for group, cpus in enumerate((64, 16)))
    for part, words in ((light, {"--het-group=0", "--nodes=2"}), (heavy, {"--het-group=1", "--nodes=5"})):
        agents = srun_command(config, part, ["/lost", "agent"], Path("/t"))
        assert words | {f"--cpus-per-task={part.cpus}", f"--output=/t/agent-{part.group}.%n.log"} < set(agents)
        assert words < set(guard_command(config, part, Path("/lost")))


def test_dry_run_shows_every_script():
    config = Config(cluster=ClusterConfig(nodes=2, cpus_per_node=8))
    text = steps_as_text(config, TrialPaths(Path("/r/t")), ["python", "agent"])
    for part in ("srun --job-name=agents", "--cpus-per-task=8", "bash -c agent.sh agent /r/t/job/no-coordinator-JOB-0"):
        assert part in text.splitlines()[0]
    assert "REALSYS_SHIELDED" in text and "scontrol requeue" in text


def run_agent(tmp_path, code):
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
def test_agent_without_slurm_reports_a_lost_launcher(code, is_lost, tmp_path):
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
def test_guard_queues_a_job_again_once(before, after, calls, tmp_path):
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


# ---- The settings for kinds of clusters that a user copies


SLURM = Path(__file__).parents[4] / "slurm"


@pytest.mark.parametrize("name", sorted(path.stem for path in (SLURM / "cluster").glob("*.yaml")))
def test_settings_of_a_cluster_are_accepted(name):
    words = ["experiment=arith", f"cluster={name}", "cluster.nodes=2", "fileroot=/shared/runs"]
    config = compose(words, config_dir=SLURM)
    assert config.cluster.launcher == "slurm" and config.cluster.nodes == 2 and config.cluster.name_store.start
    check_slurm(config)


def test_own_cluster_needs_no_more_than_a_name():
    assert compose(["experiment=arith", "cluster=slurm"]).cluster.launcher == "slurm"


# ---- Settings of a job that SLURM, or the batch script, could not take


def checked(slurm, nodes=1):
    check_slurm(Config(cluster=ClusterConfig(nodes=nodes, slurm=slurm)))


def test_defaults_are_accepted():
    checked(SlurmConfig())


@pytest.mark.parametrize(
    ("slurm", "nodes", "text"),
    [
        (SlurmConfig(), 0, "cluster.nodes=0"),
        (SlurmConfig(partition="a b"), 1, "cluster.slurm.partition='a b': must be one word"),
        (SlurmConfig(setup=["a\nb"]), 1, "cluster.slurm.setup='a\\nb': must be one line"),
        (SlurmConfig(container=ContainerConfig(mounts=["a\nb"])), 1, "cluster.slurm.container.mounts"),
        (SlurmConfig(options=["mail=END"]), 1, "must begin with -"),
        (SlurmConfig(cpu_options=["constraint=a"]), 1, "must begin with -"),
        (
            SlurmConfig(options=["--array=0-3"]),
            1,
            "cluster.slurm.options='--array=0-3': would run one trial several times",
        ),
        (SlurmConfig(options=["-a0-3"]), 1, "would run one trial several times"),
        (SlurmConfig(cpu_options=["--a\nb"]), 1, "cluster.slurm.cpu_options="),
        (SlurmConfig(cpu_partition="cpu"), 1, "cluster.slurm.cpu_partition='cpu': has no effect"),
        (SlurmConfig(gpu_type="h100"), 1, "cluster.slurm.gpu_type='h100': has no effect"),
        (SlurmConfig(exclusive=False), 1, "slurm.exclusive=False: gives one core of each node: set cluster.cpus_"),
        (SlurmConfig(cpu_partition="a b"), 1, "cluster.slurm.cpu_partition='a b': must be one word"),
        (SlurmConfig(time="soon"), 1, "cluster.slurm.time='soon': cannot be read"),
        (SlurmConfig(time="4"), 1, "leaves no time to train: the run stops 300 s before it"),
        (SlurmConfig(signal_s=70_000), 1, "must be at most 65535"),
    ],
)
def test_wrong_setting_is_one_line(slurm, nodes, text):
    with pytest.raises(ConfigError) as caught:
        checked(slurm, nodes)
    assert text in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("1:00:00", 3600),
        ("2-0", 172_800),
        ("1-12:30", 131_400),
        ("1-00:00:10", 86_410),
        ("0:240:0", 14_400),
    ],
)
def test_time_limit_is_read_as_sbatch_does(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("mounts", "is_seen"),
    [
        ([], False),
        (["/other", "/s"], False),
        (["/shared/runs:/runs"], False),
        (["/shared"], True),
        (["/other", "/shared/:/shared:rw"], True),
        (["/shared/runs"], True),
    ],
)
def test_container_must_see_the_trial_folder(mounts, is_seen):
    """Else its agents would look for the launcher in vain."""
    slurm = SlurmConfig(container=ContainerConfig(image="i.sif", mounts=mounts))
    config = Config(fileroot="/shared/runs", cluster=ClusterConfig(nodes=1, slurm=slurm))
    with contextlib.nullcontext() if is_seen else pytest.raises(ConfigError, match="mounts=.*: add /shared/runs, or"):
        check_slurm(config)


@pytest.mark.parametrize(("word", "text"), [("90", "90"), ("24:00:00", "24:00:00"), ("1-12:30", "1-12:30")])
def test_time_limit_of_the_command_line(word, text):
    config = compose(["experiment=arith", f"cluster.slurm.time={word}"])
    assert config.cluster.slurm.time == text


@pytest.mark.parametrize("text", ["24:00:00", "1:00:10"])
def test_time_limit_in_a_file_needs_quotes(text, tmp_path):
    """YAML reads hours, minutes and seconds as a number of seconds, which sbatch would take as minutes."""
    (tmp_path / "cluster").mkdir()
    file = tmp_path / "cluster" / "own.yaml"
    file.write_text(f"# @package _global_\ncluster:\n  slurm:\n    time: {text}\n")
    with pytest.raises(ConfigError, match='cluster.slurm.time=.*: write time: "24:00:00" in quotes') as caught:
        compose(["experiment=arith", "cluster=own"], config_dir=tmp_path)
    assert "86400" not in caught.value.problem
    file.write_text(file.read_text().replace(text, f"'{text}'"))
    assert compose(["experiment=arith", "cluster=own"], config_dir=tmp_path).cluster.slurm.time == text


HOST = {"REALSYS_HOST": "10.0.0.1"}
SETUP = SlurmConfig(setup=["module load x", "export REALSYS_HOST=$(hostname -i)"])
HANDED = "REALSYS_HOST=.* is handed to all 2 nodes.* set cluster.interface"
NO_SUBNET = "cluster.interface='10.1.0.0/99': cannot be read as a subnet"


@pytest.mark.parametrize(
    ("cluster", "environment", "problem"),
    [
        ({"nodes": 1, "spare_nodes": 1}, {}, "cluster.interface=''.* cannot reach each other on loopback"),
        ({"nodes": 1}, {}, ""),
        ({"nodes": 2, "interface": "ib0"}, {}, ""),
        ({"nodes": 1, "interface": "10.1.0.0/99"}, {}, NO_SUBNET),
        ({"nodes": 2, "interface": "10.1.0.0/99"}, {}, NO_SUBNET),
        # the batch script runs on the first node, and srun hands its variables to all
        ({"nodes": 2}, HOST, HANDED),
        ({"nodes": 2, "interface": "ib0"}, HOST, HANDED),
        ({"nodes": 2, "slurm": SETUP}, {}, HANDED),
        ({"nodes": 2, "slurm": SETUP, "interface": "ib0"}, {}, HANDED),
        ({"nodes": 1}, HOST, ""),
        ({"nodes": 1, "interface": "ib0"}, HOST, ""),
        ({"nodes": 1, "slurm": SETUP}, {}, ""),
        ({"nodes": 1, "slurm": SETUP, "interface": "ib0"}, {}, ""),
        ({"nodes": 2, "interface": "ib0"}, {"REALSYS_HOST": ""}, ""),
    ],
)
def test_nodes_of_a_job_need_a_network(cluster, environment, problem):
    refused = pytest.raises(ConfigError, match=problem) if problem else contextlib.nullcontext()
    with refused:
        check_network(Config(cluster=ClusterConfig(**cluster)), environment)


def test_request_for_cores_of_two_kinds_is_accepted():
    slurm = SlurmConfig(exclusive=False, cpu_partition="cpu", gpu_type="h100")
    cluster = ClusterConfig(nodes=2, cpu_nodes=1, gpus_per_node=1, cpus_per_node=8, cpus_per_cpu_node=8, slurm=slurm)
    check_slurm(Config(cluster=cluster))
    with pytest.raises(ConfigError, match="gives one core of each node: set cluster.cpus_per_cpu_node=N"):
        check_slurm(Config(cluster=cluster.model_copy(update={"cpus_per_cpu_node": 0})))


# ---- The variables of an allocation


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
    ],
)
def test_hosts_are_those_of_scontrol(text, hosts):
    assert list(expand(text)) == hosts


def test_allocation_has_the_fewest_cpus():
    env = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_JOB_CPUS_PER_NODE": "16(x2),8",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_RESTART_COUNT": "2",
    }
    assert SlurmAllocation.read(env) == SlurmAllocation("7", ["n1", "n2", "n3"], 8, 4, 2)


def test_heterogeneous_job_has_two_components():
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "c1", "SLURM_HET_SIZE": "2", "SLURM_RESTART_COUNT": "1"}
    env |= {"SLURM_JOB_NODELIST_HET_GROUP_0": "c1", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "64"}
    env |= {"SLURM_JOB_NODELIST_HET_GROUP_1": "g[1-2]", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "32(x2)"}
    light = SlurmAllocation("7", ["c1"], 64, restarts=1, group=0)
    assert SlurmAllocation.components(env) == [light, SlurmAllocation("7", ["g1", "g2"], 32, restarts=1, group=1)]


def test_no_allocation_without_a_job():
    assert SlurmAllocation.read({}) is None and SlurmAllocation.components({}) == []


def test_unreadable_list_is_an_error():
    with pytest.raises(ValueError, match="invalid literal"):
        SlurmAllocation.read({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[x-3]"})


# ---- Lines about a job that is followed


def test_life_of_a_job_that_is_queued_again():
    watch = JobWatch("7")
    states = [
        JobState("PENDING", "Priority"),
        JobState("PENDING", "Priority"),
        JobState("PENDING", "Resources", start="2026-01-02T03:04:05"),
        JobState("RUNNING", host="a1"),
        JobState("COMPLETING"),
        JobState("PENDING", "BeginTime"),
        JobState("RUNNING", host="a2"),
        JobState("COMPLETED", exit_code=0),
    ]
    assert [line for state in states if (line := watch.observe(state))] == [
        "job 7 waits (pending: Priority)",
        "job 7 waits (pending: Resources; expected to start at 2026-01-02T03:04:05)",
        "job 7 runs on a1",
        "job 7 waits again (pending: BeginTime)",
        "job 7 runs on a2",
        "job 7 has ended: completed, exit code 0",
    ]
    assert watch.ended and watch.exit_code == 0


def test_job_that_slurm_forgot_has_ended():
    watch = JobWatch("7")
    assert watch.observe(None) == "job 7 is not known to SLURM any more"
    assert watch.ended and watch.exit_code is None


def test_silence_of_slurm_is_told_once():
    watch = JobWatch("7")
    assert [watch.silent("squeue: x") for _ in range(2)] == ["squeue: x; the job goes on", ""]
    assert not watch.ended
