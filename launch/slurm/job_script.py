"""Renders the batch script of a trial. Pure: Config, Job -> text of slurm/job.sh with its places filled.

One job has all nodes of the plan and the spares. With nodes of two kinds it is heterogeneous: the first component has
the light nodes, the second one the others. The batch script runs `realsys run` on the first node. That starts one agent
per node with srun (realsys.launch.launchers.slurm). The section ``cluster.slurm`` describes the cluster.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from realsys.config.schema import Config
from realsys.launch.nodes.base import EXIT_NO_MACHINE
from realsys.launch.slurm.slurm_options import REQUEUE_CODE

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
    places = [
        f"--{name}={value}" for name in ("partition", "reservation", "constraint") if (value := getattr(slurm, name))
    ]
    own = [*sizes, *gpus, *places]
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
    for name in ("account", "qos", "time"):
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
