"""The parts of a chaos run: the job, the phases, a fault at a phase, and the run that several faults share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from realsys.launch.nodes.orders import KILL_MARGIN_S
from tests.chaos.live import ChaosRun
from tests.support.faults.plan import Fault
from tests.support.jobs.jobs import SMALL

LEASE_S, BEAT_S = 3.0, 0.5
SUSPENDED_S = 1.25 * LEASE_S  # a suspended worker's lease has lapsed when it wakes up
LOST_S = LEASE_S + KILL_MARGIN_S + 2.0  # a node that is suspended for so long is lost before it wakes up
SUSPENDED = f"SIGSTOP {SUSPENDED_S:g} s"

#: The job of every case. eta 1 and one worker of each kind: buffered groups last for two steps, so that a third
#: step needs the victim. A checkpoint at every other step, so that each row meets some.
JOB = [
    *SMALL,
    # Long enough, and the sums short enough, for right answers and wrong ones.
    "warmup.steps=30",
    "data.arith.max_operands=2",
    "data.arith.max_operand=3",
    "train.optimizer.lr=1e-6",
    "record.keep_steps=1000",
    "evaluation.problems=0",
    "train.batch_groups=4",
    "rollout.group_size=2",
    "rollout.workers=1",
    "asynchronous.max_staleness=1",
    "checkpoint.every_steps=2",
    f"cluster.lease_s={LEASE_S}",
    f"cluster.heartbeat_s={BEAT_S}",
    "cluster.max_restarts=40",
]

_OVER_NODES = ("cluster.host=0.0.0.0", "cluster.name_store.file_between_hosts=true")

#: phase -> worker that passes it, and the failpoint
PHASES = {
    "rollout running": ("rollout_worker/0", "rollout.running"),
    "push": ("rollout_worker/0", "rollout.push"),
    "finish": ("rollout_worker/0", "rollout.finish"),
    "batch planning": ("master_worker/0", "master.batch"),
    "train step": ("model_worker/0", "train.step"),
    "weight write": ("model_worker/0", "weights.write"),
    "publish": ("master_worker/0", "weights.publish"),
    "stage": ("generation_server/0", "server.stage"),
    "load": ("generation_server/0", "server.load"),
    "checkpoint": ("model_worker/0", "checkpoint.write"),
}

Needs = Literal["", "root", "etcd", "sglang"]


@dataclass(frozen=True, slots=True)
class Row:
    """One fault at one phase: at one failpoint or several, or an ``act`` on a run that trains.

    ``in_order``: each of ``faults`` may fire once the one before it has. ``waits``: a RolloutWorker that generates
    nothing until they have fired, so that the other one must. ``logged``: a pattern that must be in a log; without
    it the fault was harmless. ``said``: patterns of the output of launcher and agents. Until ``act`` has returned and
    all patterns have appeared, the MasterWorker holds the third step of the row, unless all of its faults are the
    trainer's: later steps prove the recovery.
    """

    fault: str
    phase: str
    faults: tuple[Fault, ...] = ()
    act: Callable[[ChaosRun], None] | None = None
    in_order: bool = False
    waits: str = ""
    said: tuple[str, ...] = ()
    logged: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One run. ``ends``: pattern for the cause with which it must end; without it the run must complete.

    nodes   over which it runs, each with an agent; 0: its processes are children of its launcher
    spares  further agents
    """

    name: str
    rows: tuple[Row, ...]
    overrides: tuple[str, ...] = ()
    ends: str = ""
    needs: Needs = ""
    nodes: int = 0
    spares: int = 0

    @property
    def title(self) -> str:
        return f"{self.name} over agents" if self.nodes else self.name

    @property
    def agents(self) -> int:
        return self.nodes + self.spares

    @property
    def settings(self) -> tuple[str, ...]:
        """Overrides of the job."""
        if not self.nodes:
            return self.overrides
        return (*_OVER_NODES, f"cluster.nodes={self.nodes}", f"cluster.spare_nodes={self.spares}", *self.overrides)


def fault(worker: str, point: str, action: str, **fields: object) -> Fault:
    """A fault without name and gate; the driver sets both."""
    return Fault("", worker, point, action, **fields)  # type: ignore[arg-type]


def row(what: str, phase: str, worker: str, point: str, action: str, *, logged: str = "", **fields: object) -> Row:
    """One fault of one failpoint."""
    return Row(what, phase, (fault(worker, point, action, **fields),), logged=logged)


def struck(
    victim: str, phases: Sequence[str], action: Literal["kill", "stop"], *, called: str = "", by: str = ""
) -> list[Row]:
    """Send a signal to ``victim`` at each phase. The worker of PHASES sends it, or ``by``."""
    name = {"kill": "SIGKILL", "stop": SUSPENDED}[action]
    rows = []
    for phase in phases:
        usual, point = PHASES[phase]
        worker = by or usual
        other = "" if victim == worker else victim
        label = f"{name} {called or victim.removesuffix('/0')}"
        rows.append(row(label, phase, worker, point, action, victim=other, seconds=SUSPENDED_S))
    return rows
