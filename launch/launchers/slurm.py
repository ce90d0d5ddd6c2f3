"""The launcher ``slurm``: inside an allocation, srun starts one agent per node, and one guard per node.

    batch script (slurm/job.sh) ── realsys run ──┬─ srun ──┬─ agent.sh ── realsys node-agent   on node 1
                                                 │         └─ agent.sh ── realsys node-agent   on node 2, ...
                                                 └─ srun ──┬─ guard.sh                         on node 1
                                                           └─ guard.sh                         on node 2, ...

The agents end when the coordinator orders it. When the batch script of a job has ended, SLURM ends everything else
of the job. If the first node is lost, so is the batch script: then an agent writes a file, and a guard, which is never
in a container, queues the job again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from realsys.cluster.child_process import ChildProcess, how_it_ended
from realsys.cluster.network import HOST
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError, RealsysError
from realsys.launch.launchers.base import Launcher
from realsys.launch.slurm.hosts import JOB, Allocation
from realsys.launch.slurm.job_script import escaped
from realsys.launch.slurm.slurm_client import SlurmError, signal_steps
from realsys.launch.slurm.slurm_options import check_network, check_slurm

_STEP, _GUARDS = "agents", "guards"  # names of the steps
_STOP_S = 5.0  # time that srun has to end, before and after a signal
#: seconds that an agent looks for another coordinator: then the job has none, and is queued again
_AGENT_WAIT_S = 20


class SlurmLauncher(Launcher):
    """Runs srun as a child process of the coordinator."""

    def __init__(self, config: Config, paths: TrialPaths) -> None:
        super().__init__(config, paths)
        self._log = paths.logs / "srun.log"
        self._srun: ChildProcess | None = None
        self._guards: ChildProcess | None = None
        self._ended = ""

    @classmethod
    def check(cls, config: Config) -> None:
        check_slurm(config)
        if HOST not in os.environ:  # sbatch hands it to the nodes
            check_network(config)

    @classmethod
    def check_start(cls, config: Config) -> None:
        allocation, cluster = _allocation(), config.cluster
        wanted = cluster.nodes + cluster.spare_nodes
        if allocation is None:
            problem = (
                "starts agents in an allocation, and this is none: use realsys submit with the same words, or salloc"
            )
            raise ConfigError("cluster.launcher", "slurm", problem)
        if len(allocation.hosts) < wanted:
            problem = f"and {cluster.spare_nodes} spare nodes do not fit job {allocation.job}"
            raise ConfigError("cluster.nodes", cluster.nodes, f"{problem}: it has {len(allocation.hosts)} nodes")

    @classmethod
    def settings(cls, config: Config) -> Mapping[str, tuple[Any, str]]:
        allocation = _allocation()
        if allocation is None:
            return {}
        nodes = len(allocation.hosts) - config.cluster.spare_nodes
        reason = f"job {allocation.job} has {len(allocation.hosts)} nodes"
        values: dict[str, tuple[Any, str]] = {"cluster.nodes": (nodes, reason)} if nodes > 0 else {}
        if allocation.gpus:
            values["cluster.gpus_per_node"] = (
                allocation.gpus,
                f"job {allocation.job} has {allocation.gpus} on each node",
            )
        return values

    async def start(self, agent: Sequence[str], say: Callable[[str], None]) -> None:
        allocation = _allocation()
        if allocation is None:
            raise RealsysError("cluster.launcher=slurm: this process is not in an allocation")
        file = _no_coordinator(self.paths, allocation)
        file.parent.mkdir(exist_ok=True)
        file.unlink(missing_ok=True)
        self._log.parent.mkdir(exist_ok=True)
        guards = guard_command(self.config, file)
        agents = srun_command(self.config, allocation, [str(file), *agent], self.paths.logs)
        with self._log.open("ab") as output:
            try:
                self._guards = ChildProcess(guards, os.environ, output, on_exit=self._on_guards_exit)
                self._srun = ChildProcess(agents, os.environ, output, on_exit=self._on_exit)
            except OSError as exc:
                raise RealsysError(f"srun cannot be started: {exc.strerror}: it must be on the PATH") from None
        say(f"job {allocation.job}: agents on {', '.join(allocation.hosts)}")

    def problem(self) -> str:
        return self._ended

    async def stop(self) -> None:
        if self._guards is not None:
            self._guards.signal(signal.SIGTERM)  # srun ends its tasks
        if self._srun is not None and not await self._srun.exits_within(_STOP_S):
            # Not by a signal to srun, which would kill the agents: they would have no time to end their processes.
            with contextlib.suppress(SlurmError):
                await asyncio.to_thread(signal_steps, os.environ[JOB], _STEP, "TERM")
        for srun in filter(None, (self._srun, self._guards)):
            await srun.exits_within(_STOP_S)
            srun.kill()
            srun.reap()

    def _on_exit(self) -> None:
        assert self._srun is not None
        code = self._srun.reap()
        self._ended = f"srun {how_it_ended(code)}: {_last_line(self._log)}"

    def _on_guards_exit(self) -> None:
        assert self._guards is not None
        self._guards.reap()


def srun_command(config: Config, allocation: Allocation, agent: Sequence[str], logs: Path) -> list[str]:
    """Return the command that runs agent.sh once per node, each with a log of its own in ``logs``. Pure.

    ``agent``: the words for agent.sh, a file and the command of an agent.
    """
    container = config.cluster.slurm.container
    # Written on each node: the agents outlive the srun of a lost first node.
    command = [*_step(config, _STEP), f"--output={escaped(logs)}/agent-%n.log", "--open-mode=append"]
    if allocation.cpus:
        command += [f"--cpus-per-task={allocation.cpus}", "--cpu-bind=none"]
    command += config.cluster.slurm.srun
    file, *words = [*agent, "--wait", str(_AGENT_WAIT_S)]
    if container.image:
        words = [container.python if word == sys.executable else word for word in words]
        mounts = ",".join(container.mounts)
        if container.runtime == "pyxis":
            command += [f"--container-image={container.image}", *container.args]
            command += [f"--container-mounts={mounts}"] if mounts else []
        else:
            bind = ["--bind", mounts] if mounts else []
            words = ["apptainer", "exec", *container.args, *bind, container.image, *words]
    return [*command, *_script("agent"), file, *words]


def guard_command(config: Config, file: Path) -> list[str]:
    """Return the command that runs guard.sh once per node, which waits for ``file``. Pure."""
    return [*_step(config, _GUARDS), "--output=/dev/null", *_script("guard"), str(file)]


def steps_as_text(config: Config, paths: TrialPaths, agent: Sequence[str]) -> list[str]:
    """Return the steps of a job, each with its script, for a dry run: the number of the job is not known yet. Pure."""
    allocation = Allocation("JOB", [], config.cluster.cpus_per_node)
    file = _no_coordinator(paths, allocation)
    steps = {
        "agent": srun_command(config, allocation, [str(file), *agent], paths.logs),
        "guard": guard_command(config, file),
    }
    texts = []
    for name, command in steps.items():
        script = command.index("bash") + 2
        line = shlex.join([*command[:script], f"{name}.sh", *command[script + 1 :]])
        texts.append(f"{line}\n{name}.sh:\n{command[script]}")
    return texts


def _no_coordinator(paths: TrialPaths, allocation: Allocation) -> Path:
    """Return the file that an agent writes when it finds no coordinator."""
    return paths.job.with_name(f"no-coordinator-{allocation.job}-{allocation.restarts}")


def _step(config: Config, name: str) -> list[str]:
    """Return the start of an srun command with one task per node."""
    nodes = config.cluster.nodes + config.cluster.spare_nodes
    command = ["srun", f"--job-name={name}", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    # A task on a lost node, or one that fails, is no reason to end the others; other steps may share the nodes.
    return [*command, "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--overlap"]


def _script(name: str) -> list[str]:
    text = resources.files("realsys.slurm").joinpath(f"{name}.sh").read_text("utf-8")
    return ["bash", "-c", text, name]


def _allocation() -> Allocation | None:
    try:
        return Allocation.read(os.environ)
    except ValueError as exc:
        names = ("SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE")
        value = {name: os.environ.get(name) for name in names}
        raise ConfigError("environment", value, f"cannot be read: {exc}") from None


def _last_line(log: Path) -> str:
    try:
        lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    except OSError as exc:
        return f"{log}: {exc.strerror}"
    return lines[-1][:300] if lines else f"see {log}"
