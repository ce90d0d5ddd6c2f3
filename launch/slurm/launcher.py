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
import functools
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from realsys.cluster.children.child_process import ChildProcess, how_it_ended
from realsys.cluster.network import HOST, is_loopback, subnet_of
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError, RealsysError
from realsys.launch.launchers.contract import Launcher
from realsys.launch.nodes.orders import EXIT_NO_MACHINE
from realsys.launch.slurm.client import SlurmError, signal_steps

_STEP, _GUARDS = "agents", "guards"  # names of the steps
_STOP_S = 5.0  # time that srun has to end, before and after a signal
#: seconds that an agent looks for another coordinator: then the job has none, and is queued again
_AGENT_WAIT_S = 20


class SlurmLauncher(Launcher):
    """Runs srun as a child process of the coordinator."""

    def __init__(self, config: Config, paths: TrialPaths) -> None:
        super().__init__(config, paths)
        self._log = paths.logs / "srun.log"
        self._agents: list[ChildProcess] = []  # one srun for each component of the job
        self._guards: list[ChildProcess] = []
        self._ended = ""

    @classmethod
    def check(cls, config: Config) -> None:
        check_slurm(config)
        check_network(config, os.environ)

    @classmethod
    def check_start(cls, config: Config) -> None:
        parts, cluster = _components(), config.cluster
        wanted = cluster.machines
        if not parts:
            problem = "needs a SLURM allocation: run it inside salloc or sbatch, or use realsys submit"
            raise ConfigError("cluster.launcher", "slurm", problem)
        if (there := sum(len(part.hosts) for part in parts)) < wanted:
            problem = f"and {cluster.spare_nodes} spare nodes do not fit job {parts[0].job}"
            raise ConfigError("cluster.nodes", cluster.nodes, f"{problem}: it has {there} nodes")

    @classmethod
    def settings(cls, config: Config) -> Mapping[str, tuple[Any, str]]:
        parts = _components()
        if len(parts) != 1:  # only the user knows the kinds of the nodes
            return {}
        [allocation] = parts
        there, spares = len(allocation.hosts), config.cluster.spare_nodes
        reason = f"job {allocation.job} has {there} nodes"
        if there <= spares and not config.cluster.nodes:
            raise ConfigError("cluster.spare_nodes", spares, f"leave no node for the trial: {reason}")
        values: dict[str, tuple[Any, str]] = {"cluster.nodes": (there - spares, reason)}
        if allocation.gpus:
            values["cluster.gpus_per_node"] = (
                allocation.gpus,
                f"job {allocation.job} has {allocation.gpus} on each node",
            )
        return values

    async def start(self, agent: Sequence[str], say: Callable[[str], None]) -> None:
        parts = _components()
        if not parts:
            raise RealsysError("cluster.launcher=slurm: this process is not in an allocation")
        file = self._released(parts[0])
        self._log.parent.mkdir(exist_ok=True)
        with self._log.open("ab") as output:
            for part in parts:
                guards = guard_command(self.config, part, file)
                agents = srun_command(self.config, part, [str(file), *agent], self.paths.logs)
                try:
                    self._guards.append(ChildProcess(guards, os.environ, output))
                    ended = functools.partial(self._on_exit, len(self._agents))
                    self._agents.append(ChildProcess(agents, os.environ, output, on_exit=ended))
                except OSError as exc:
                    raise RealsysError(f"srun cannot be started: {exc.strerror}: it must be on the PATH") from None
        say(f"job {parts[0].job}: agents on {', '.join(host for part in parts for host in part.hosts)}")

    def own_machine(self) -> str:
        return os.environ.get("SLURMD_NODENAME", "")  # not set on a login node

    def problem(self) -> str:
        return self._ended

    async def stop(self) -> None:
        for srun in self._guards:
            srun.signal(signal.SIGTERM)  # srun ends its tasks
        if not await _exit_within(_STOP_S, self._agents):
            # Not by a signal to srun, which would kill the agents: they would have no time to end their processes.
            with contextlib.suppress(SlurmError):
                await asyncio.to_thread(signal_steps, os.environ[JOB], _STEP, "TERM")
        await _exit_within(_STOP_S, [*self._agents, *self._guards])
        for srun in (*self._agents, *self._guards):
            srun.kill()
            srun.reap()

    def _released(self, allocation: SlurmAllocation) -> Path:
        """Return the file for this run. Guards of earlier runs of the job, which SLURM may have left, end by theirs."""
        files = [
            _no_coordinator(self.paths, replace(allocation, restarts=number))
            for number in range(allocation.restarts + 1)
        ]
        files[-1].parent.mkdir(exist_ok=True)
        files[-1].unlink(missing_ok=True)
        for earlier in files[:-1]:
            earlier.touch()
        return files[-1]

    def _on_exit(self, number: int) -> None:
        code = self._agents[number].reap()
        self._ended = f"srun {how_it_ended(code)}: {_last_line(self._log)}"


async def _exit_within(timeout_s: float, processes: Sequence[ChildProcess]) -> bool:
    return all(await asyncio.gather(*(process.exits_within(timeout_s) for process in processes)))


def srun_command(config: Config, allocation: SlurmAllocation, agent: Sequence[str], logs: Path) -> list[str]:
    """Return the command that runs agent.sh once per node, with one log per node in ``logs``. Pure.

    ``agent``: the words for agent.sh, a file and the command of an agent.
    """
    container = config.cluster.slurm.container
    # Written on each node: the agents outlive the srun of a lost first node.
    log = "agent-%n.log" if allocation.group is None else f"agent-{allocation.group}.%n.log"
    command = [*_step(config, allocation, _STEP), f"--output={escaped(logs)}/{log}", "--open-mode=append"]
    if allocation.cpus:
        command += [f"--cpus-per-task={allocation.cpus}", "--cpu-bind=none"]
    command += config.cluster.slurm.srun
    file, words = agent[0], [*agent[1:], "--once", "--wait", str(_AGENT_WAIT_S)]
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


def guard_command(config: Config, allocation: SlurmAllocation, file: Path) -> list[str]:
    """Return the command that runs guard.sh once per node, which waits for ``file``. Pure."""
    words = [str(file), allocation.job, str(allocation.restarts)]
    return [*_step(config, allocation, _GUARDS), "--output=/dev/null", *_script("guard"), *words]


def steps_as_text(config: Config, paths: TrialPaths, agent: Sequence[str]) -> str:
    """Return the steps of a job and their scripts, for a dry run: the number of the job is not known yet. Pure."""
    cluster = config.cluster
    parts = [SlurmAllocation("JOB", [], cluster.cpus_per_node, group=1 if cluster.cpu_nodes else None)]
    if cluster.cpu_nodes:
        parts.insert(0, SlurmAllocation("JOB", [], cluster.cpus_per_cpu_node, group=0))
    file = _no_coordinator(paths, parts[0])
    commands = [srun_command(config, part, [str(file), *agent], paths.logs) for part in parts]
    commands += [guard_command(config, part, file) for part in parts]
    lines, scripts = [], {}
    for command in commands:
        at = command.index("bash") + 2  # bash -c SCRIPT NAME ...
        name = f"{command[at + 1]}.sh"
        lines.append(shlex.join([*command[:at], name, *command[at + 1 :]]))
        scripts[name] = command[at]
    return "\n".join([*lines, *(f"\n{name}:\n{text}" for name, text in scripts.items())])


def _no_coordinator(paths: TrialPaths, allocation: SlurmAllocation) -> Path:
    """Return the file that an agent writes when it has lost its coordinator."""
    return paths.job.with_name(f"no-coordinator-{allocation.job}-{allocation.restarts}")


def _step(config: Config, allocation: SlurmAllocation, name: str) -> list[str]:
    """Return the start of an srun command with one task per node of the allocation."""
    cluster, group = config.cluster, allocation.group
    light = 0 if group is None else cluster.cpu_nodes
    nodes = light if group == 0 else cluster.nodes - light + cluster.spare_nodes
    command = ["srun", *([] if group is None else [f"--het-group={group}"]), f"--job-name={name}"]
    command += [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    # A task on a lost node, or one that fails, is no reason to end the others; other steps may share the nodes.
    return [*command, "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--overlap"]


def _script(name: str) -> list[str]:
    text = resources.files("realsys.slurm").joinpath(f"{name}.sh").read_text("utf-8")
    return ["bash", "-c", text, name]


def _components() -> list[SlurmAllocation]:
    try:
        return SlurmAllocation.components(os.environ)
    except (ValueError, KeyError) as exc:
        value = {
            name: text for name, text in os.environ.items() if name.startswith(("SLURM_JOB_NODE", "SLURM_JOB_CPUS"))
        }
        raise ConfigError("environment", value, f"cannot be read: {exc}") from None


def _last_line(log: Path) -> str:
    try:
        lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    except OSError as exc:
        return f"{log}: {exc.strerror}"
    return lines[-1][:300] if lines else f"see {log}"


# ---- reads the variables of SLURM that describe an allocation. Pure


JOB = "SLURM_JOB_ID"


@dataclass(frozen=True, slots=True)
class SlurmAllocation:
    """The nodes of a job, or of one component of a heterogeneous job.

    cpus   those of the node that has the fewest, 0 if SLURM does not say
    group  number of the component; None: the job is not heterogeneous
    """

    job: str
    hosts: list[str]
    cpus: int = 0
    gpus: int = 0
    restarts: int = 0
    group: int | None = None

    @classmethod
    def read(cls, env: Mapping[str, str]) -> SlurmAllocation | None:
        """Return the allocation in which this process runs, None outside of one. Raises ValueError."""
        if not env.get(JOB) or not env.get("SLURM_JOB_NODELIST"):
            return None
        return cls(
            env[JOB],
            list(expand(env["SLURM_JOB_NODELIST"])),
            _fewest_cpus(env.get("SLURM_JOB_CPUS_PER_NODE", "0")),
            _number(env.get("SLURM_GPUS_ON_NODE", "")),
            _number(env.get("SLURM_RESTART_COUNT", "")),
        )

    @classmethod
    def components(cls, env: Mapping[str, str]) -> list[SlurmAllocation]:
        """Return the components of a heterogeneous job, else the one allocation; [] outside of a job.

        Raises ValueError.
        """
        whole = cls.read(env)
        if whole is None:
            return []
        groups = range(_number(env.get("SLURM_HET_SIZE", "")))
        return [
            cls(
                whole.job,
                list(expand(env[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"])),
                _fewest_cpus(env.get(f"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_{group}", "0")),
                restarts=whole.restarts,
                group=group,
            )
            for group in groups
        ] or [whole]


def _fewest_cpus(text: str) -> int:
    # 8(x3),16: three nodes with 8 CPUs, one with 16
    return min(int(part.partition("(")[0]) for part in text.split(","))


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def expand(hosts: str) -> Iterator[str]:
    """Yield the names of a list of hosts as SLURM writes it: ``gpu[01-03,7],login``. Raises ValueError."""
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hosts):
        yield from _expand_one(part)


def _expand_one(part: str) -> Iterator[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    ranges, _, after = rest.partition("]")
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield from (f"{before}{number:0{len(first)}d}{tail}" for tail in _expand_one(after))


# ---- checks the section ``cluster.slurm`` before anything is written. Pure


SECTION = "cluster.slurm"
#: exit code of a run that SLURM stopped shortly before the time limit
REQUEUE_CODE = 128 + signal.SIGUSR1
_WORDS = ("partition", "cpu_partition", "account", "gpu_type")
_SETS_HOST = re.compile(rf"\b{HOST}=\S")
_TIMES = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


def check_slurm(config: Config) -> None:
    """Check the settings of a job. Raises ConfigError."""
    slurm = config.cluster.slurm
    if not config.cluster.nodes:
        raise ConfigError("cluster.nodes", 0, "must be the number of nodes of the job: set cluster.nodes=N")
    for name in _WORDS:
        value = getattr(slurm, name)
        if re.search(r"\s", value):
            raise ConfigError(f"{SECTION}.{name}", value, "must be one word")
    for name, text in _lines(config):
        if not text.isprintable():
            raise ConfigError(f"{SECTION}.{name}", text, "must be one line: write one entry per line")
    for option in (*slurm.options, *slurm.cpu_options, *slurm.srun):
        if not option.startswith("-"):
            raise ConfigError(f"{SECTION}.options", option, "must begin with -: write --name=value")
        if re.match(r"--array\b|-a", option):
            raise ConfigError(
                f"{SECTION}.options", option, "would run one trial several times: submit one job for each"
            )
    if slurm.time and seconds_of(slurm.time) <= slurm.signal_s:
        problem = f"leaves no time to train: the run stops {slurm.signal_s} s before it (cluster.slurm.signal_s)"
        raise ConfigError(f"{SECTION}.time", slurm.time, f"{problem}: raise it, or lower signal_s")
    if slurm.signal_s > 65535:
        raise ConfigError(f"{SECTION}.signal_s", slurm.signal_s, "must be at most 65535, the limit of sbatch --signal")
    # settings of the request that have no effect, or give a node one core
    cluster, slurm = config.cluster, config.cluster.slurm
    if slurm.cpu_partition and not cluster.cpu_nodes:
        problem = "has no effect, because all nodes are of one kind: set cluster.cpu_nodes=N, or leave it empty"
        raise ConfigError(f"{SECTION}.cpu_partition", slurm.cpu_partition, problem)
    if slurm.gpu_type and not cluster.gpus_per_node:
        problem = "has no effect, because the job asks for no GPUs: set cluster.gpus_per_node=N, or leave it empty"
        raise ConfigError(f"{SECTION}.gpu_type", slurm.gpu_type, problem)
    cores = {"cpus_per_node": cluster.cpus_per_node}
    if cluster.cpu_nodes:
        cores["cpus_per_cpu_node"] = cluster.cpus_per_cpu_node
    for name, count in cores.items():
        if not slurm.exclusive and not count:
            problem = f"gives one core of each node: set cluster.{name}=N"
            raise ConfigError(f"{SECTION}.exclusive", slurm.exclusive, problem)
    # a container that would not see the trial folder under its own path
    container, folder = config.cluster.slurm.container, Path(config.fileroot).resolve()
    if not container.image:
        return
    for mount in container.mounts:
        outside, _, inside = mount.partition(":")
        same = not inside or inside.partition(":")[0].rstrip("/") == outside.rstrip("/")
        # A link outside may be missing inside: the path that the agents get has none.
        if same and folder.is_relative_to(outside):
            return
    problem = f"the container would not see fileroot ({folder}) under its path: add {folder}, or a folder above it"
    raise ConfigError(f"{SECTION}.container.mounts", container.mounts, problem)


def check_network(config: Config, environment: Mapping[str, str]) -> None:
    """Refuse a subnet in a wrong form, and several nodes that would meet on loopback or all get one address.

    Raises ConfigError.

    sbatch and srun hand ``environment`` to every node, and so the variables of the batch script.
    """
    cluster = config.cluster
    subnet_of(cluster.interface)
    if cluster.machines <= 1:
        return
    if given := environment.get(HOST) or next(filter(_SETS_HOST.search, cluster.slurm.setup), ""):
        problem = f"is handed to all {cluster.machines} nodes, and at most one has that address: unset it"
        raise ConfigError(HOST, given, f"{problem}, and set cluster.interface to the network that they share")
    if is_loopback(cluster.host) and not cluster.interface:
        problem = "the nodes cannot reach each other on loopback: name the network that they share (ib0, 10.1.0.0/16)"
        raise ConfigError("cluster.interface", cluster.interface, problem)


def _lines(config: Config) -> Iterator[tuple[str, str]]:
    slurm = config.cluster.slurm
    for name in ("options", "cpu_options", "setup", "srun"):
        yield from ((name, text) for text in getattr(slurm, name))
    for name in ("image", "python"):
        yield f"container.{name}", getattr(slurm.container, name)
    for name in ("mounts", "args"):
        yield from ((f"container.{name}", text) for text in getattr(slurm.container, name))


def seconds_of(text: str) -> int:
    """Return the seconds of a time limit as sbatch reads it. Raises ConfigError.

    ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``, ``D-H:M:S``.
    """
    match = _TIMES.fullmatch(text)
    if match is None:
        raise ConfigError(f"{SECTION}.time", text, "cannot be read: write D-HH:MM:SS, HH:MM:SS or minutes")
    parts = [int(part) for part in (match["first"], match["second"], match["third"]) if part is not None]
    units = (3600, 60, 1) if match["days"] is not None or len(parts) == 3 else (60, 1, 1)
    return int(match["days"] or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


# ---- renders the batch script of a trial. Pure: Config, Job -> text of slurm/job.sh with its places filled
#
# One job has all nodes of the plan and the spares. With nodes of two kinds it is heterogeneous: the first component
# has the light nodes, the second one the others. The batch script runs `realsys run` on the first node. That starts
# one agent per node with srun (realsys.launch.slurm.launcher). The section ``cluster.slurm`` describes the cluster.


_REQUEUE = f"""\
if [ "$code" -eq {EXIT_NO_MACHINE} ]; then
  code={REQUEUE_CODE}  # the job has lost a node, and no spare could take its place
fi
if [ "$code" -eq {REQUEUE_CODE} ]; then scontrol requeue "$SLURM_JOB_ID"; fi"""
_NO_REQUEUE = "# cluster.slurm.requeue=false: the job is not queued again"


@dataclass(frozen=True, slots=True)
class Job:
    """The part of a job that the configuration does not have.

    command  of the run; it also continues the trial
    cwd      folder in which the user gave the command
    output   file of its output; ``%j`` is the number of the job
    """

    command: Sequence[str]
    cwd: Path
    output: Path
    env: Mapping[str, str] = field(default_factory=dict)


def job_name(config: Config) -> str:
    """Return the name of the trial's jobs in SLURM."""
    return f"{config.experiment}-{config.trial}"


def render(config: Config, job: Job) -> str:
    """Return the batch script of a trial."""
    slurm = config.cluster.slurm
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(job.env.items())]
    places = {
        "directives": "\n".join(f"#SBATCH {option}" for option in _directives(config, job)),
        "setup": "\n".join([*slurm.setup, *exports]),
        "command": shlex.join(job.command),
        "requeue": _REQUEUE if slurm.requeue else _NO_REQUEUE,
    }
    text = resources.files("realsys.slurm").joinpath("job.sh").read_text("utf-8")
    for place, value in places.items():
        text = text.replace(f"@{place}@", value, 1)
    return text


def _directives(config: Config, job: Job) -> Iterator[str]:
    """Yield the options of sbatch. The first component has those of the batch script."""
    cluster, slurm = config.cluster, config.cluster.slurm
    heavy = cluster.nodes - cluster.cpu_nodes + cluster.spare_nodes
    kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    gpus = [f"--gpus-per-node={kind}{cluster.gpus_per_node}"] if cluster.gpus_per_node else []
    sizes = _sizes(heavy, cluster.cpus_per_node, cluster.memory_gb_per_node, exclusive=slurm.exclusive)
    own = [*sizes, *gpus, *([f"--partition={slurm.partition}"] if slurm.partition else [])]
    if cluster.cpu_nodes:
        light = (cluster.cpu_nodes, cluster.cpus_per_cpu_node, cluster.memory_gb_per_cpu_node)
        yield from _sizes(*light, exclusive=slurm.exclusive)
        if partition := slurm.cpu_partition or slurm.partition:
            yield f"--partition={partition}"
        yield from [*_common(config), *map(_directive, slurm.cpu_options), *_of_the_script(config, job)]
        yield "hetjob"
        yield from [*own, *_common(config), *map(_directive, slurm.options)]
    else:
        yield from [*own, *_common(config), *_of_the_script(config, job), *map(_directive, slurm.options)]


def _sizes(nodes: int, cpus: int, memory_gb: float, *, exclusive: bool) -> Iterator[str]:
    yield f"--nodes={nodes}"
    yield "--ntasks-per-node=1"
    if cpus:
        yield f"--cpus-per-task={cpus}"
    if memory_gb:
        yield f"--mem={int(memory_gb * 1024)}M"
    elif exclusive:
        yield "--mem=0"  # all of the node
    if exclusive:
        yield "--exclusive"


def _common(config: Config) -> Iterator[str]:
    """Yield the options that each component has."""
    slurm = config.cluster.slurm
    yield f"--job-name={job_name(config)}"
    for name in ("account", "time"):
        if value := getattr(slurm, name):
            yield f"--{name}={value}"
    yield "--no-kill"  # the loss of a node is left to the run: spare nodes take its place
    yield "--requeue" if slurm.requeue else "--no-requeue"


def _of_the_script(config: Config, job: Job) -> Iterator[str]:
    yield f"--signal=B:USR1@{config.cluster.slurm.signal_s}"
    yield "--open-mode=append"
    yield f"--chdir={_quoted(str(job.cwd))}"
    yield f"--output={_quoted(str(Path(escaped(job.output.parent), job.output.name)))}"


def escaped(folder: Path) -> str:
    """Return the folder of an output file without what SLURM would replace."""
    return str(folder).replace("%", "%%")


def _directive(option: str) -> str:
    """Quote the value of an option of the user, unless it has quotes of its own."""
    name, equals, value = option.partition("=")
    return f"{name}={_quoted(value)}" if equals and '"' not in value and "'" not in value else option


def _quoted(text: str) -> str:
    return f'"{text}"' if " " in text else text
