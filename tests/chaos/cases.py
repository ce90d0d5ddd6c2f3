"""Which faults are injected, at which phase, in which run. Pure data, in an order that a seed shuffles.

A ``Case`` is one run of the small arith job; its ``Row``s are injected one after the other, each when the one before it
has been recovered from. Where a fault is to end the run it is the only row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from realsys.cluster.failpoint import Fault
from tests.chaos import outside
from tests.chaos.live import ChaosRun
from tests.system.jobs import SMALL

LEASE_S, BEAT_S = 4.0, 0.5
SUSPENDED_S = 1.25 * LEASE_S  # a suspended worker's lease has lapsed when it wakes up

#: The job of every case. eta 1 and one worker of a kind: what is buffered lasts for two steps, so that a third one
#: needs whatever was hit. A checkpoint at every other step, so that each row meets some.
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
    "asynchronous.max_head_offpolicyness=1",
    "checkpoint.every_steps=2",
    f"cluster.lease_s={LEASE_S}",
    f"cluster.heartbeat_s={BEAT_S}",
    "cluster.max_restarts=40",
]

#: phase -> who gets there, and the failpoint
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
STATELESS = ("rollout_worker/0", "generation_server/0", "gserver_manager/0")
TRAINING = ("model_worker/0", "master_worker/0")
#: restarts of one stateless worker in one run: its back-off doubles each time
PER_RUN = 4

Outside = Callable[[ChaosRun], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One fault at one phase: of failpoints (several where it takes more than one), or done to a run that trains."""

    fault: str
    phase: str
    faults: tuple[Fault, ...] = ()
    act: Outside | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One run. ``ends``: it is to end with an error of which the cause matches this; else it completes."""

    name: str
    rows: tuple[Row, ...]
    overrides: tuple[str, ...] = ()
    ends: str = ""
    needs: Literal["", "root", "etcd"] = ""


def _fault(worker: str, point: str, action: str, **fields: object) -> Fault:
    return Fault("", worker, point, action, **fields)  # type: ignore[arg-type]


def _struck(victims: Sequence[str], phases: Sequence[str], action: Literal["kill", "stop"]) -> list[Row]:
    """Every victim at every phase."""
    name = {"kill": "SIGKILL", "stop": f"SIGSTOP {SUSPENDED_S:g} s"}[action]
    rows = []
    for phase in phases:
        worker, point = PHASES[phase]
        for victim in victims:
            fault = _fault(worker, point, action, victim="" if victim == worker else victim, seconds=SUSPENDED_S)
            rows.append(Row(f"{name} {victim.removesuffix('/0')}", phase, (fault,)))
    return rows


def _signals(rng: random.Random) -> list[Case]:
    """SIGKILL and SIGSTOP of every kind of worker at every phase."""
    cases = []
    for action in ("kill", "stop"):
        phases = rng.sample(list(PHASES), len(PHASES))
        for number, at in enumerate(range(0, len(phases), PER_RUN)):
            rows = _struck(STATELESS, phases[at : at + PER_RUN], action)
            cases.append(Case(f"{action}-stateless-{number}", tuple(rng.sample(rows, len(rows)))))
        for victim in TRAINING:
            rows = _struck([victim], phases, action)
            cases.append(Case(f"{action}-{victim.removesuffix('/0').replace('_', '-')}", tuple(rows)))
    return cases


def _row(fault: str, phase: str, worker: str, point: str, action: str, **fields: object) -> Row:
    return Row(fault, phase, (_fault(worker, point, action, **fields),))


def _more_kills() -> Case:
    """Moments between two acts that must go together."""
    return Case(
        "kill-between",
        (
            _row("SIGKILL master_worker", "manifest", "master_worker/0", "weights.manifest", "kill"),
            _row("SIGKILL master_worker", "published, not reported", "master_worker/0", "master.trained", "kill"),
            _row("SIGKILL master_worker", "checkpoint commit", "master_worker/0", "checkpoint.commit", "kill"),
            _row("SIGKILL master_worker", "checkpoint complete", "master_worker/0", "checkpoint.complete", "kill"),
            _row("SIGKILL gserver_manager", "journal append", "gserver_manager/0", "manager.journal", "kill"),
            _row("SIGKILL verifier", "judging", "verifier/0", "verifier.judge", "kill"),
        ),
    )


def _disk() -> list[Case]:
    """The weight path and the checkpoints on a disk that is full, slow or lies."""
    model, master = "model_worker/0", "master_worker/0"
    mended = (
        _row("ENOSPC once", "weight write", model, "weights.write", "error"),
        _row("EIO once", "weight write", model, "weights.write", "error", errno="EIO"),
        _row("slow disk, 3 s", "weight write", model, "weights.write", "slow", seconds=3.0),
        _row("ENOSPC once", "checkpoint", model, "checkpoint.write", "error"),
        _row("slow disk, 3 s", "checkpoint", model, "checkpoint.write", "slow", seconds=3.0),
        _row("ENOSPC once", "checkpoint commit", master, "checkpoint.commit", "error"),
        _row("ENOSPC once", "journal append", "gserver_manager/0", "manager.journal", "error"),
        _row("EIO once", "stage", "generation_server/0", "server.stage", "error", errno="EIO"),
        _row("slow disk, 3 s", "stage", "generation_server/0", "server.stage", "slow", seconds=3.0),
    )
    shard = {"file": "*.safetensors"}
    damaged = (
        _row("shard truncated", "weight write", model, "weights.shard", "truncate"),
        _row("shard, one bit flipped", "publish", master, "weights.publish", "flip", **shard),
        _row("shard truncated", "publish", master, "weights.publish", "truncate", **shard),
        _row("manifest, one bit flipped", "publish", master, "weights.publish", "flip", file="MANIFEST.json"),
        _row("manifest truncated", "publish", master, "weights.publish", "truncate", file="MANIFEST.json"),
    )
    full = _row("ENOSPC for good", "weight write", model, "weights.write", "error", every=True)
    return [
        Case("disk-mended", mended),
        Case("damage", damaged),
        Case("disk-full", (full,), ("cluster.max_restarts=1",), ends=r"model_worker/0: .*No space left on device"),
        Case("tmpfs-freed", (Row("disk really full, then freed", "training", act=outside.fill_disk),), needs="root"),
        Case(
            "tmpfs-full",
            (Row("disk really full for good", "training", act=outside.fill_disk_for_good),),
            ("cluster.max_restarts=1",),
            ends="No space left on device|disk full",
            needs="root",
        ),
    ]


def _messages() -> list[Case]:
    """Each socket: what a network or a stranger may do to it."""
    rollout, model = "rollout_worker/0", "model_worker/0"
    rows = (
        _row("message lost", "push-pull", rollout, "push.send", "drop"),
        _row("message twice", "push-pull", rollout, "push.send", "duplicate"),
        _row("message garbled", "push-pull", rollout, "push.send", "garbage"),
        _row("acknowledgement lost", "push-pull", rollout, "push.ack", "drop"),
        _row("request lost", "request-reply", model, "request.receive", "drop"),
        _row("reply lost", "request-reply", model, "reply.send", "drop"),
        _row("reply twice", "request-reply", model, "reply.send", "duplicate"),
        _row("reply garbled", "request-reply", model, "reply.send", "garbage"),
        _row("reply lost", "manager HTTP", rollout, "manager.call", "drop"),
        _row("request twice", "manager HTTP", rollout, "manager.call", "duplicate"),
        _row("request garbled", "manager HTTP", rollout, "manager.call", "garbage"),
        _row("reply to master lost", "manager HTTP", "master_worker/0", "manager.call", "drop"),
        _row("reply lost", "server HTTP", rollout, "server.call", "drop"),
        _row("request twice", "server HTTP", rollout, "server.call", "duplicate"),
        _row("request garbled", "server HTTP", rollout, "server.call", "garbage"),
        _row("reply lost", "server HTTP, update", "gserver_manager/0", "server.call", "drop"),
    )
    strangers = (
        Row("stranger sends garbage", "push-pull", act=outside.garbage_to_puller),
        Row("stranger sends garbage", "request-reply", act=outside.garbage_to_master),
        Row("stranger sends garbage", "manager HTTP", act=outside.garbage_to_manager),
        Row("stranger sends garbage", "server HTTP", act=outside.garbage_to_server),
    )
    return [Case("messages", rows, ("manager.rollout_lease_s=20",)), Case("strangers", strangers)]


def _verifiers() -> Case:
    judge = "verifier/0", "verifier.judge"
    return Case(
        "verifier",
        (
            _row("verifier hangs", "judging", *judge, "slow", seconds=600.0),
            _row("verifier exits", "judging", *judge, "exit"),
            _row("verifier floods memory", "judging", *judge, "hoard"),
        ),
        ("rollout.reward.timeout_s=2",),
    )


def _clocks() -> Case:
    day = 86400.0
    rows = []
    for who in ("gserver_manager/0", "rollout_worker/0", "master_worker/0"):
        point = {"gserver_manager/0": "manager.journal", "rollout_worker/0": "rollout.running"}.get(who, "master.batch")
        for seconds, what in ((day, "a day ahead"), (-day, "a day back")):
            rows.append(
                _row(f"clock of {who.removesuffix('/0')} jumps {what}", "training", who, point, "jump", seconds=seconds)
            )
    # Its incarnation must be newer than its predecessor's all the same.
    kill = _fault("master_worker/0", "master.batch", "kill")
    back = _fault("master_worker/0", "worker.start", "jump", seconds=-day)
    rows.append(Row("SIGKILL master_worker, back with its clock a day back", "batch planning", (kill, back)))
    return Case("clock", tuple(rows))


def _name_store() -> Case:
    return Case(
        "etcd",
        (
            Row("SIGKILL etcd", "training", act=outside.kill_etcd),
            Row("SIGKILL etcd", "training, again", act=outside.kill_etcd),
        ),
        # A lease outlasts the restart of the store: no worker has to be restarted for it.
        ("cluster.name_store.backend=etcd", "cluster.name_store.start=true", "cluster.lease_s=60"),
        needs="etcd",
    )


def full(seed: int) -> list[Case]:
    """Everything, the longest runs first."""
    rng = random.Random(seed)
    return [*_signals(rng), *_messages(), *_disk(), _verifiers(), _clocks(), _more_kills(), _name_store()]


def short() -> list[Case]:
    """A few of each kind, for `make test`."""
    kill = [
        *_struck(["rollout_worker/0"], ["push"], "kill"),
        *_struck(["generation_server/0"], ["load"], "kill"),
        _row("SIGKILL gserver_manager", "journal append", "gserver_manager/0", "manager.journal", "kill"),
        *_struck(["model_worker/0"], ["train step"], "kill"),
        *_struck(["master_worker/0"], ["publish"], "kill"),
    ]
    by_name = {case.name: case for case in full(0)}
    damaged = by_name["damage"]
    mixed = (damaged.rows[1], *by_name["messages"].rows[:1], *by_name["strangers"].rows[2:3])
    return [
        Case("short-kills", tuple(kill)),
        Case("short-damage", mixed),
        replace(by_name["disk-full"], name="short-full"),
    ]
