"""Faults of the agents of a run over two nodes, of its launcher, and of the messages between them.

MasterWorker, GserverManager and ModelWorker are on node0; GenerationServer and RolloutWorker are on node1. An agent is
suspended by a process of the other node: a process that ends with the node could not wake it up.
"""

import random

from tests.chaos import outside
from tests.chaos.schedule.rows import LEASE_S, LOST_S, PHASES, Case, Row, fault, struck

FIRST, SECOND = "node0", "node1"
BRIEF_S = LEASE_S / 3
ANY_AGENT = "node_agent/*"
MODEL, MASTER, ROLLOUT = "model_worker/0", "master_worker/0", "rollout_worker/0"
ON_FIRST = [phase for phase, (worker, _) in PHASES.items() if worker in (MODEL, MASTER)]
ON_SECOND = [phase for phase in PHASES if phase not in ON_FIRST]


def runs(rng: random.Random) -> list[Case]:
    """The runs whose agents and launchers fail. A node is lost three times at most: its workers back off."""
    return [_booted_again(rng), _replaced(rng), _messages(), _lost_etcd()]


def short() -> Case:
    """For `make test`."""
    rows = [
        *struck(ROLLOUT, ["push"], "kill", called="rollout_worker over agents"),
        _killed(SECOND, "train step"),
        _killed(FIRST, "rollout running"),
    ]
    return Case("short-nodes", tuple(rows), nodes=2)


def _booted_again(rng: random.Random) -> Case:
    """A dead agent is started again under its name."""
    everywhere = list(PHASES)
    rows = (
        _killed(FIRST, rng.choice(everywhere)),
        _killed(SECOND, rng.choice(everywhere)),
        _suspended(SECOND, rng.choice(ON_FIRST), LOST_S),
        Row(
            "SIGKILL launcher, then the same command",
            "training",
            act=outside.kill_launcher,
            said=("training continues after step",),
        ),
        _suspended(FIRST, rng.choice(ON_SECOND), LOST_S),
        _suspended(FIRST, rng.choice(ON_SECOND), BRIEF_S),
        _suspended(SECOND, rng.choice(ON_FIRST), BRIEF_S),
        Row(
            "SIGKILL agents of both nodes",
            "publish",
            (
                fault(MASTER, "weights.manifest", "kill", victim=SECOND),
                fault(MASTER, "weights.publish", "kill", victim=FIRST),
            ),
            in_order=True,
            said=(_lost(FIRST), _lost(SECOND)),
        ),
        Row(
            f"SIGSTOP {LOST_S:g} s launcher",
            "training",
            act=outside.suspend_launcher_until_lost,
            said=(_lost(FIRST), _lost(SECOND)),
        ),
    )
    return Case("booted-nodes", rows, nodes=2)


def _replaced(rng: random.Random) -> Case:
    """A spare takes the place of a lost node, and another machine becomes a spare."""
    rows = (
        _killed(FIRST, rng.choice(ON_SECOND), "a spare takes over"),
        _killed(SECOND, rng.choice(ON_FIRST), "a spare takes over"),
        _suspended(FIRST, rng.choice(ON_SECOND), LOST_S, "a spare takes over"),
        _suspended(SECOND, rng.choice(ON_FIRST), LOST_S, "a spare takes over"),
        Row(
            "SIGKILL model_worker, then agent of node0",
            "training side restarts",
            (fault(MODEL, "train.step", "kill"), fault(MODEL, "worker.start", "kill", victim=FIRST)),
            in_order=True,
            said=(_lost(FIRST),),
        ),
    )
    return Case("replaced-nodes", rows, nodes=2, spares=1)


def _messages() -> Case:
    """Orders and reports between launcher and agents. A garbled one costs its node."""
    died = fault(ROLLOUT, "rollout.push", "kill")
    rows = []
    for what, said, action in (
        ("lost", (), "drop"),
        ("twice", (), "duplicate"),
        ("garbled", (_lost("node."),), "garbage"),
    ):
        orders = fault(ANY_AGENT, "request.receive", action)
        answers = fault(ANY_AGENT, "reply.send", action)
        report = fault(ANY_AGENT, "notice.send", action)
        rows += [
            Row(f"order {what}", "agents", (orders,), said=said),
            Row(f"answer {what}", "agents", (answers,), said=said),
            Row(f"SIGKILL rollout_worker, report {what}", "agents", (died, report), in_order=True, said=said),
        ]
    rows.append(Row("stranger sends garbage", "agents", act=outside.garbage_to_coordinator))
    return Case("orders", tuple(rows), nodes=2)


def _lost_etcd() -> Case:
    """The machine with the own etcd is lost. Its address would be another one, which no process knows."""
    settings = ("cluster.name_store.backend=etcd", "cluster.name_store.start=true")
    rows = (_killed(FIRST, "publish", "with etcd"),)
    return Case("lost-etcd", rows, settings, ends="name_store/0", needs="etcd", nodes=2)


def _killed(node: str, phase: str, note: str = "") -> Row:
    return _struck("SIGKILL", node, phase, "kill", 0.0, note)


def _suspended(node: str, phase: str, seconds: float, note: str = "") -> Row:
    return _struck(f"SIGSTOP {seconds:g} s", node, phase, "stop", seconds, note)


def _struck(signal: str, node: str, phase: str, action: str, seconds: float, note: str) -> Row:
    worker, point = PHASES[phase]
    called = f"{signal} agent of {node}" + (f", {note}" if note else "")
    said = {0.0: (_lost(node),), BRIEF_S: (), LOST_S: (_lost(node), "all processes have ended")}[seconds]
    return Row(called, phase, (fault(worker, point, action, victim=node, seconds=seconds),), said=said)


def _lost(node: str) -> str:
    return f"was lost with its node {node} "
