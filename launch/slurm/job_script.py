"""Checks the section ``cluster.slurm`` before anything is written. Pure."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from realsys.cluster.network import HOST, is_loopback, subnet_of
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.nodes.orders import EXIT_NO_MACHINE

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
