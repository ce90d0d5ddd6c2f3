"""Fields of a job under SLURM."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from realsys.config.fields import Positive, Section

_HOUR_S = 3600  # HH:MM:SS without quotes is at least this number


class ContainerConfig(Section):
    """The container in which the processes of a job run. The batch script itself runs outside of it."""

    image: str = Field(
        "", description="image, as the runtime names it (`/shared/realsys.sif`, `registry#realsys:1`); empty: none"
    )
    runtime: Literal["apptainer", "pyxis"] = Field(
        "apptainer", description="`apptainer exec` on each node, or the options of pyxis for srun (enroot)"
    )
    mounts: list[str] = Field(
        [], description="`PATH` or `OUTSIDE:INSIDE`; the folders of trials, models and data must be the same inside"
    )
    python: str = Field("python3", description="Python inside the container that has realsys")
    args: list[str] = Field(["--nv"], description="further options of `apptainer exec`, or of srun with pyxis")


class SlurmConfig(Section):
    """The SLURM job of a trial: options of sbatch and srun, and lines of the batch script."""

    partition: str = Field("", description="partition; empty: the default of the cluster, as in all fields below")
    account: str = Field("", description="account to charge")
    qos: str = Field("", description="quality of service")
    reservation: str = Field("", description="reservation")
    constraint: str = Field("", description="features that the nodes must have")
    time: str = Field(
        "",
        description='time limit, as `D-HH:MM:SS`, `HH:MM:SS` (in a file in quotes: `"24:00:00"`), minutes below 3600',
    )
    exclusive: bool = Field(True, description="whole nodes; false: only what `cluster.*_per_node` says")
    gpu_type: str = Field("", description="type of the GPUs in the request (`h100`); empty: any")
    signal_s: Positive = Field(
        300, description="seconds before the time limit at which the run takes a checkpoint and is queued again"
    )
    requeue: bool = Field(True, description="queue the job again at its time limit, and if it loses its first node")
    options: list[str] = Field([], description="further options of sbatch (`--mail-type=END`), one per entry")
    setup: list[str] = Field([], description="lines of the batch script before the run (`module load cuda/12.4`)")
    cpu_partition: str = Field("", description="partition of the nodes without GPUs (cluster.cpu_nodes)")
    cpu_options: list[str] = Field([], description="further options of sbatch for them (`--constraint=amd`)")
    srun: list[str] = Field([], description="further options of the srun that starts the agents")
    container: ContainerConfig = ContainerConfig()

    @field_validator("time", mode="before")
    @classmethod
    def _minutes(cls, value: object) -> object:
        """Take a whole number as minutes. YAML reads 24:00:00 without quotes as 86400, a number of seconds."""
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        if value >= _HOUR_S:
            problem = 'must be a number of minutes below 3600: write time: "24:00:00" in quotes, or D-HH:MM:SS'
            raise PydanticCustomError("time_limit", problem)
        return str(value)
