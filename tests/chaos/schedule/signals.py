"""SIGKILL and SIGSTOP/SIGCONT of every kind of worker at every phase, dealt to runs by a seed."""

import random
from dataclasses import replace

from tests.chaos import outside
from tests.chaos.schedule.rows import PHASES, SUSPENDED, SUSPENDED_S, Case, Row, fault, row, struck

STATELESS = ("rollout_worker/0", "generation_server/0", "gserver_manager/0")
TRAINING = ("model_worker/0", "master_worker/0")
RUNS = 8
SERVER = "generation_server/0"
IN_MEMORY = "weights.transport=memory"


def everybody(rng: random.Random) -> list[Case]:
    """Every kind of worker at every phase, both signals: each run gets some of all, in a shuffled order.

    Every other run hands its weights over in memory.
    """
    dealt: list[list[Row]] = [[] for _ in range(RUNS)]
    for number, victim in enumerate((*STATELESS, *TRAINING)):
        rows = struck(victim, list(PHASES), "kill") + struck(victim, list(PHASES), "stop")
        for at, found in enumerate(rng.sample(rows, len(rows))):
            dealt[(at + 4 * number) % RUNS].append(found)  # 4: so that each run gets as many as the next
    transports = [(), (IN_MEMORY,)] * RUNS
    return [
        Case(f"signals-{number}", tuple(rng.sample(rows, len(rows))), transports[number])
        for number, rows in enumerate(dealt)
    ]


def two_ranks() -> Case:
    """A trainer of two ranks: one of them dies, during a collective or during a push to it."""
    second, called = "model_worker/1", "model_worker/1 of 2"
    rows = []
    for action in ("kill", "stop"):
        rows += struck(second, ["train step", "checkpoint"], action, called=called, by=second)  # type: ignore[arg-type]
        rows += struck(second, ["weight write", "push"], action, called=called)  # type: ignore[arg-type]
    rows += struck("model_worker/0", ["checkpoint"], "kill", called="model_worker/0 of 2")
    return Case("two-ranks", tuple(rows), ("allocation=sglang.d1p1m1+d2p1m1", IN_MEMORY))


def two_rollout_workers() -> Case:
    """One dies while the other works; the next row needs it back."""
    first, second = "rollout_worker/0", "rollout_worker/1"
    struck_rows = [
        *struck(second, ["rollout running", "push"], "kill", called=f"{second} of 2", by=second),
        *struck(second, ["finish"], "stop", called=f"{second} of 2", by=second),
        *struck(second, ["push"], "kill", called=f"{second} of 2, again", by=second),
    ]
    rows = [replace(found, waits=first) for found in struck_rows]
    rows += [replace(found, waits=second) for found in struck(first, ["push"], "kill", called=f"{first} of 2")]
    return Case("two-rollout-workers", tuple(rows), ("rollout.workers=2",))


def reward_services() -> Case:
    """One of two dies, or is suspended, with completions in it; messages of both are lost."""
    first, second = "reward_service/0", "reward_service/1"
    worker, phase = "rollout_worker/0", "completions arrive"
    return Case(
        "reward-services",
        (
            row(f"SIGKILL {first} of 2", phase, first, "reward.judge", "kill"),
            row(f"{SUSPENDED} {second} of 2", phase, second, "reward.judge", "stop", seconds=SUSPENDED_S),
            row("call of a reward service lost", "rollout running", worker, "reward.call", "drop"),
            row("reply of a reward service lost", "completions judged", worker, "reward.reply", "drop"),
            row("reply of a reward service garbled", "completions judged", worker, "reward.reply", "garbage"),
        ),
        ("rollout.reward.services=2",),
    )


def between() -> Case:
    """Moments between two acts that must go together, and processes that are no workers."""
    master = "master_worker/0"
    return Case(
        "between",
        (
            row("SIGKILL master_worker", "manifest", master, "weights.manifest", "kill"),
            row("SIGKILL master_worker", "trained, not reported", master, "master.trained", "kill"),
            row("SIGKILL master_worker", "checkpoint commit", master, "checkpoint.commit", "kill"),
            row("SIGKILL master_worker", "checkpoint complete", master, "checkpoint.complete", "kill"),
            row("SIGKILL gserver_manager", "journal append", "gserver_manager/0", "manager.journal", "kill"),
            row("SIGKILL gserver_manager", "journal sync", "gserver_manager/0", "manager.sync", "kill"),
            row("SIGKILL verifier", "judging", "verifier/0", "verifier.judge", "kill"),
            Row(f"{SUSPENDED} launcher", "training", act=outside.suspend_launcher),
            Row(
                "SIGKILL model_worker, then gserver_manager",
                "training side restarts",
                (
                    fault("model_worker/0", "train.step", "kill"),
                    fault(master, "worker.start", "kill", victim="gserver_manager/0"),
                ),
                in_order=True,
            ),
        ),
    )


def name_store() -> Case:
    """The run's own etcd."""
    etcd, master = "name_store/0", "master_worker/0"
    return Case(
        "etcd",
        (
            row("SIGKILL etcd", "rollout running", "rollout_worker/0", "rollout.running", "kill", victim=etcd),
            row("SIGKILL etcd", "publish", master, "weights.publish", "kill", victim=etcd),
            Row(
                "SIGKILL model_worker, then etcd",
                "training side restarts",
                (fault("model_worker/0", "train.step", "kill"), fault(master, "worker.start", "kill", victim=etcd)),
                in_order=True,
            ),
            row("SIGSTOP 5 s etcd", "publish", master, "weights.publish", "stop", victim=etcd, seconds=5.0),
            Row(
                "SIGKILL generation_server, then SIGSTOP 5 s etcd",
                "server restarts",
                (
                    fault("generation_server/0", "server.load", "kill"),
                    fault("generation_server/0", "worker.start", "stop", victim=etcd, seconds=5.0),
                ),
                in_order=True,
            ),
            row("SIGKILL etcd", "checkpoint", "model_worker/0", "checkpoint.write", "kill", victim=etcd),
            Row("stranger sends garbage", "etcd", act=outside.garbage_to_etcd),
        ),
        # A lease outlasts the restart of the store: no worker has to be restarted for it.
        ("cluster.name_store.backend=etcd", "cluster.name_store.start=true", "cluster.lease_s=60"),
        needs="etcd",
    )


def lent_devices() -> Case:
    """A server and a rank that use one device in turn, at each moment of a switch."""
    rows = []
    for worker, point, phase in (
        ("master_worker/0", "devices.taken", "servers asleep"),
        ("master_worker/0", "devices.left", "ranks have left"),
        ("model_worker/0", "devices.leave", "ranks leave"),
        ("generation_server/0", "server.sleep", "servers fall asleep"),
        ("generation_server/0", "server.wake", "servers wake"),
    ):
        name = worker.removesuffix("/0")
        rows += [
            row(f"SIGKILL {name}", phase, worker, point, "kill"),
            row(f"{SUSPENDED} {name}", phase, worker, point, "stop", seconds=SUSPENDED_S),
            row("SIGKILL gserver_manager", phase, worker, point, "kill", victim="gserver_manager/0"),
        ]
    rows += [
        row("SIGKILL generation_server", "train step, asleep", "model_worker/0", "train.step", "kill", victim=SERVER),
        row("SIGKILL model_worker", "load, awake", SERVER, "server.load", "kill", victim="model_worker/0"),
    ]
    return Case("lent-devices", tuple(rows), ("allocation=serve.d1|d1",))


def sglang() -> Case:
    """The generation server with the real SGLang in it: the server, and what runs below it."""
    running, child = ("rollout_worker/0", "rollout.running"), "sglang/0"
    sending = ("model_worker/0", "weights.send")
    return Case(
        "with-sglang",
        (
            row("SIGSTOP 5 s SGLang", "rollout running", *running, "stop", victim=child, seconds=5.0),
            row(
                "SIGKILL SGLang",
                "rollout running",
                *running,
                "kill",
                victim=child,
                logged="SGLang was killed by SIGKILL",
            ),
            row("SIGKILL generation_server", "rollout running, SGLang", *running, "kill", victim="generation_server/0"),
            row("SIGKILL model_worker", "group send", *sending, "kill"),
            # It dies before it has its part, or with all of it and before the load has ended.
            row(
                "SIGKILL SGLang",
                "group send",
                *sending,
                "kill",
                victim=child,
                logged=r"not sent to|update to .* failed",
            ),
            row("SIGKILL generation_server", "group send", *sending, "kill", victim="generation_server/0"),
            row("SIGSTOP 25 s model_worker", "group send", *sending, "stop", seconds=25.0),
            row(
                "SIGSTOP SGLang for good",
                "rollout running",
                *running,
                "stop",
                victim=child,
                seconds=600.0,
                # SGLang was sampling, or loading a version.
                logged="SGLang has sampled nothing for 30 s|no answer within 30 s",
            ),
        ),
        (
            "generation=sglang",
            "weights.transport=group",
            "generation.sglang.silence_timeout_s=30",
            "manager.update_timeout_s=30",
            "cluster.connect_timeout_s=400",
            "cluster.lease_s=10",
        ),
        needs="sglang",
    )
