"""Renders the batch script of a trial. Pure: Config, Job -> text of slurm/job.sh with its places filled.

One job has all nodes of the plan and the spares. Its batch script runs `realsys run` on the first node. That starts one
agent per node with srun (realsys.launch.launchers.slurm). Everything that depends on the cluster comes from the section
``cluster.slurm``.
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
        "directives": "\n".join(f"#SBATCH {option}" for option in _options(config, job)),
        "setup": "\n".join([*slurm.setup, *exports]),
        "command": shlex.join(job.command),
        "requeue": _REQUEUE if slurm.requeue else _NO_REQUEUE,
    }
    text = resources.files("realsys.slurm").joinpath("job.sh").read_text("utf-8")
    for place, value in places.items():
        text = text.replace(f"@{place}@", value, 1)
    return text


def _options(config: Config, job: Job) -> Iterator[str]:
    cluster, slurm = config.cluster, config.cluster.slurm
    yield f"--job-name={job_name(config)}"
    yield f"--nodes={cluster.machines}"
    yield "--ntasks-per-node=1"
    if cluster.cpus_per_node:
        yield f"--cpus-per-task={cluster.cpus_per_node}"
    if cluster.memory_gb_per_node:
        yield f"--mem={int(cluster.memory_gb_per_node * 1024)}M"
    elif slurm.exclusive:
        yield "--mem=0"  # all of the node
    if cluster.gpus_per_node:
        kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
        yield f"--gpus-per-node={kind}{cluster.gpus_per_node}"
    if slurm.exclusive:
        yield "--exclusive"
    for name in ("partition", "account", "qos", "reservation", "constraint", "time"):
        if value := getattr(slurm, name):
            yield f"--{name}={value}"
    yield "--no-kill"  # the loss of a node is left to the run: spare nodes take its place
    yield "--requeue" if slurm.requeue else "--no-requeue"
    yield f"--signal=B:USR1@{slurm.signal_s}"
    yield "--open-mode=append"
    yield f"--chdir={_quoted(str(job.cwd))}"
    yield f"--output={_quoted(str(Path(escaped(job.output.parent), job.output.name)))}"
    yield from slurm.options


def escaped(folder: Path) -> str:
    """Return the folder of an output file without what SLURM would replace."""
    return str(folder).replace("%", "%%")


def _quoted(text: str) -> str:
    return f'"{text}"' if " " in text else text
