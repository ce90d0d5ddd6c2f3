"""The sections ``cluster`` and ``telemetry``: machines, launchers, name store, time limits, trackers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from realsys.config.fields import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Probability, Section

_HOUR_S = 3600  # HH:MM:SS without quotes is at least this number


# ---- launchers and name store


class NameStoreConfig(Section):
    """The store of keys with which the processes of a trial find each other."""

    backend: Literal["file", "etcd"] = Field("file", description="a shared directory, or an etcd server")
    address: str = Field(
        "127.0.0.1:2379", description="host:port of etcd; of a cluster all members, separated by commas"
    )
    ca: str = Field("", description="PEM file of the authority that signed etcd's certificates; empty: no TLS")
    cert: str = Field("", description="PEM file of the client's certificate, if etcd asks for one")
    key: str = Field("", description="PEM file of its private key")
    user: str = Field("", description="user of etcd; empty: etcd has no users")
    password_file: str = Field(
        "", description="file that holds its password; empty: the environment variable `REALSYS_ETCD_PASSWORD`"
    )
    start: bool = Field(
        False,
        description="start an etcd for this run at `address`, and restart it if it dies; with nodes, a loopback address"
        " stands for that of the first node",
    )
    file_between_hosts: bool = Field(
        False,
        description="allow the file backend with several nodes: only if all of them see a change of the directory"
        " at once, which NFS does not do",
    )
    root: str = Field("", description="directory of the file backend; empty: {trial folder}/name_store")


class RayConfig(Section):
    """A Ray cluster on which the trial runs, with ``cluster.launcher: ray``."""

    address: str = Field(
        "auto", description="host:port of its head node; auto: `RAY_ADDRESS`, or the cluster of this host"
    )
    resources: dict[str, PositiveFloat] = Field(
        {}, description="custom resources of each node, beyond the CPUs, GPUs and memory of cluster.*_per_node"
    )
    timeout_s: PositiveFloat = Field(
        300.0, description="seconds that Ray may take to find a free node, at the start and for a lost node"
    )
    autoscaler: bool = Field(
        False,
        description="the cluster grows when nodes are asked for: wait for them, do not refuse what does not fit yet",
    )


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
    options: list[str] = Field(
        [], description="further options of sbatch (`--qos=high`, `--constraint=ib`), one per entry"
    )
    setup: list[str] = Field([], description="lines of the batch script before the run (`module load cuda/12.4`)")
    cpu_partition: str = Field("", description="partition of the nodes without GPUs (cluster.cpu_nodes)")
    cpu_options: list[str] = Field(
        [], description="options of sbatch for them, in place of options (`--constraint=amd`)"
    )
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


# ---- the section cluster


#: seconds for each node at the start: all of them read their libraries, gigabytes of torch, from one file system, and
#: then every rank connects to others
_START_S = 8.0


class ClusterConfig(Section):
    """Hosts, time limits and restarts of all processes."""

    name_store: NameStoreConfig = NameStoreConfig()
    launcher: str = Field(
        "local",
        description="with nodes: who starts an agent on each machine (docs/cluster.md), or the import string"
        " `package.module:class` of your own",
    )
    nodes: NonNegative = Field(
        0, description="machines of the trial (docs/allocation.md); 0: this machine, with what it has"
    )
    ray: RayConfig = RayConfig()
    cpu_nodes: NonNegative = Field(
        0,
        description="with nodes: how many of them are of a second kind, without GPUs, for the processes that need none"
        " (docs/allocation.md)",
    )
    cpus_per_cpu_node: NonNegative = Field(0, description="with cpu_nodes: CPU cores of each; 0: not known")
    memory_gb_per_cpu_node: Annotated[float, Field(ge=0)] = Field(
        0.0, description="with cpu_nodes: host memory of each in GiB; 0: not known"
    )
    spare_nodes: NonNegative = Field(0, description="with nodes: further machines, which take the place of lost ones")
    gpus_per_node: NonNegative = Field(0, description="with nodes: GPUs of each, but for cpu_nodes")
    cpus_per_node: NonNegative = Field(0, description="with nodes: CPU cores of each; 0: not known, not checked")
    memory_gb_per_node: Annotated[float, Field(ge=0)] = Field(
        0.0, description="with nodes: host memory of each in GiB; 0: not known, not checked"
    )
    bind_cpus: Literal["none", "ranks", "all"] = Field(
        "ranks",
        description="bind processes with a GPU to the cores of its NUMA node: none, training ranks, or also servers",
    )
    threads: Positive = Field(1, description="torch threads of a training rank, or of a generation server, on CPU")
    share_gpus: bool = Field(
        False, description="let servers use GPUs that training ranks or other servers have, if there are too few"
    )
    gpu_memory_gb: NonNegativeFloat = Field(
        0.0,
        description="memory of one GPU in GiB, to plan for another machine (docs/allocation.md); 0: as here",
    )
    host: str = Field("127.0.0.1", description="address that the workers bind to and advertise, on one machine")
    interface: str = Field(
        "",
        description="network interface (`ib0`) or subnet (`10.1.0.0/16`) in which each process finds its own address;"
        " empty: host. The variable REALSYS_HOST overrides both",
    )
    ports: str = Field(
        "",
        description="ports on which the processes listen, such as `20000-20999`, for a firewall; empty: any free port."
        " gloo and NCCL choose theirs from the kernel's `ip_local_port_range`",
    )
    heartbeat_s: PositiveFloat = Field(2.0, description="seconds between two heartbeats of a worker")
    lease_s: PositiveFloat = Field(
        20.0, description="seconds without a heartbeat after which a worker counts as dead; at least 2 * heartbeat_s"
    )
    connect_timeout_s: PositiveFloat = Field(
        120.0,
        description="seconds that a worker waits for another worker at the start, and 8 more for each of `nodes`; that"
        " the launcher waits for a node",
    )
    request_timeout_s: PositiveFloat = Field(
        1800.0, description="seconds that one model function call, or handing over one group, may take"
    )
    stop_timeout_s: PositiveFloat = Field(8.0, description="seconds that processes have to stop before they are killed")
    max_restarts: NonNegative = Field(
        5,
        description="restarts in a row of one stateless worker, or of the trainer; then the run ends, or continues"
        " without that worker if others of its kind work",
    )
    min_workers_share: Probability = Field(
        0.0,
        description="share of the generation servers, of the RolloutWorkers, and of the reward services, that must work"
        " when the run gives up another one; at least one of each",
    )
    log_mb: PositiveFloat = Field(
        16.0, description="size in MiB above which the log of a process is moved to .log.1, replacing the older part"
    )
    slurm: SlurmConfig = SlurmConfig()

    @property
    def machines(self) -> int:
        """Machines of the trial, spares included; 0: this one alone."""
        return self.nodes + self.spare_nodes if self.nodes else 0

    @property
    def start_timeout_s(self) -> float:
        """Seconds that a worker waits for another worker at the start."""
        return self.connect_timeout_s + _START_S * self.nodes


# ---- the section telemetry: trackers and timeline (docs/metrics.md#trackers, docs/observe.md)


class TelemetryConfig(Section):
    """Trackers that get the metrics of a run, its curves, and the timeline of its processes."""

    trackers: list[str] = Field(
        ["file", "tensorboard"],
        description="where the launcher writes the metrics of the step log: file, tensorboard, wandb, mlflow, trackio,"
        " or package.module:Class",
    )
    tracker_args: dict[str, dict[str, Any]] = Field({}, description="name of a tracker -> its keyword arguments")
    curves_every_s: NonNegativeFloat = Field(
        300.0,
        description="seconds between two drawings of curves.png while the run lasts, in a process of the lowest"
        " priority; one more is made at its end. 0: none",
    )
    spans: bool = Field(True, description="write the timeline of every process, which `realsys trace` and `why` read")
