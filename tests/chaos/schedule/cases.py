"""The faults of each run and their phases. Pure data, in an order that a seed shuffles.

A ``Case`` is one run of the small arith job; its ``Row``s are injected one after the other, each when the one before it
has been recovered from. Where a fault is to end the run it is the only row.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.chaos import outside
from tests.chaos.schedule import nodes, signals
from tests.chaos.schedule.rows import SUSPENDED_S, Case, Row, fault, row, struck

ROLLOUT, SERVER, MANAGER = "rollout_worker/0", "generation_server/0", "gserver_manager/0"
MODEL, MASTER, VERIFIER = "model_worker/0", "master_worker/0", "verifier/0"
#: a false alarm would end these runs: a slow machine cannot miss this lease
_ONE_LIFE = ("cluster.max_restarts=1", "cluster.lease_s=20")


def _disk() -> Case:
    """The weight path, the checkpoints and the ledger on a disk that is full, slow or lies."""
    shard, manifest = {"file": "*.safetensors"}, {"file": "MANIFEST.json"}
    return Case(
        "disk",
        (
            row("ENOSPC once", "weight write", MODEL, "weights.write", "error"),
            row("EIO once", "weight write", MODEL, "weights.write", "error", errno="EIO"),
            row("slow disk, 3 s", "weight write", MODEL, "weights.write", "slow", seconds=3.0),
            row("ENOSPC once", "manifest", MASTER, "weights.manifest", "error"),
            row("slow disk, 3 s", "manifest", MASTER, "weights.manifest", "slow", seconds=3.0),
            row("ENOSPC once", "checkpoint", MODEL, "checkpoint.write", "error"),
            row("slow disk, 3 s", "checkpoint", MODEL, "checkpoint.write", "slow", seconds=3.0),
            row("ENOSPC once", "checkpoint commit", MASTER, "checkpoint.commit", "error"),
            row("ENOSPC once", "journal append", MANAGER, "manager.journal", "error"),
            row("EIO once", "journal append", MANAGER, "manager.journal", "error", errno="EIO"),
            row("slow disk, 3 s", "journal append", MANAGER, "manager.journal", "slow", seconds=3.0),
            row("EIO once", "journal sync", MANAGER, "manager.sync", "error", errno="EIO"),
            row("slow disk, 3 s", "journal sync", MANAGER, "manager.sync", "slow", seconds=3.0),
            row("EIO once", "stage", SERVER, "server.stage", "error", errno="EIO"),
            row("slow disk, 3 s", "stage", SERVER, "server.stage", "slow", seconds=3.0),
            row("shard truncated", "weight write", MODEL, "weights.shard", "truncate"),
            row("shard, one bit flipped", "publish", MASTER, "weights.publish", "flip", **shard),
            row("shard truncated", "publish", MASTER, "weights.publish", "truncate", **shard),
            row("manifest, one bit flipped", "publish", MASTER, "weights.publish", "flip", **manifest),
            row("manifest truncated", "publish", MASTER, "weights.publish", "truncate", **manifest),
            # Last, so that an earlier checkpoint exists.
            _damaged_checkpoint("one bit flipped", "flip", "*.safetensors", "is corrupt|: corrupt"),
            _damaged_checkpoint("truncated", "truncate", "*.safetensors", "truncated or overwritten"),
            _damaged_checkpoint("state, one bit flipped", "flip", "state.json", "is corrupt"),
        ),
    )


def _damaged_checkpoint(how: str, action: str, file: str, said: str) -> Row:
    """The newest one is damaged, and then needed."""
    return Row(
        f"newest checkpoint {how}, then SIGKILL model_worker",
        "checkpoint complete",
        (
            fault(MASTER, "checkpoint.complete", action, file=file),
            fault(MASTER, "weights.publish", "kill", victim=MODEL),
        ),
        in_order=True,
        logged=rf"cannot be used, the one before it is taken: \S*{file.removeprefix('*')}.*({said})",
    )


def _disk_full() -> list[Case]:
    """A disk that is full for good, or until the driver frees it."""
    failing = row("ENOSPC for good", "weight write", MODEL, "weights.write", "error", every=True)
    freed = Row("disk really full, then freed", "training", act=outside.fill_disk)
    for_good = Row("disk really full for good", "training", act=outside.fill_disk_for_good)
    return [
        Case("enospc", (failing,), _ONE_LIFE, ends=r"model_worker/0: .*No space left on device"),
        Case("tmpfs-freed", (freed,), needs="root"),
        Case("tmpfs-full", (for_good,), _ONE_LIFE, ends="No space left on device|disk full", needs="root"),
    ]


def _messages() -> Case:
    """The faults of a network and of a stranger, at each socket."""
    rows = [
        *_lost_twice_garbled("message", "push-pull", ROLLOUT, "push.send"),
        *_lost_twice_garbled("acknowledgement", "push-pull", ROLLOUT, "push.ack"),
        *_lost_twice_garbled("request", "request-reply", MODEL, "request.receive"),
        *_lost_twice_garbled("reply", "request-reply", MODEL, "reply.send"),
        *_lost_twice_garbled("notice", "request-reply", MODEL, "notice.send"),
        *_http("manager HTTP, rollout", ROLLOUT, "manager"),
        *_http("manager HTTP, training", MASTER, "manager"),
        *_http("server HTTP, rollout", ROLLOUT, "server"),
        *_http("server HTTP, update", MANAGER, "server"),
        row("verdict garbled", "verifier", VERIFIER, "verifier.reply", "garbage"),
        Row("stranger sends garbage", "push-pull", act=outside.garbage_to_puller),
        Row("stranger sends garbage", "request-reply", act=outside.garbage_to_master),
        Row("stranger sends garbage", "manager HTTP", act=outside.garbage_to_manager),
        Row("stranger sends garbage", "server HTTP", act=outside.garbage_to_server),
    ]
    return Case("messages", tuple(rows), ("manager.rollout_lease_s=20",))


def _lost_twice_garbled(what: str, socket: str, worker: str, point: str) -> list[Row]:
    return [
        row(f"{what} {how}", socket, worker, point, action)
        for how, action in (("lost", "drop"), ("twice", "duplicate"), ("garbled", "garbage"))
    ]


def _http(socket: str, client: str, to: str) -> list[Row]:
    return [
        *_lost_twice_garbled("request", socket, client, f"{to}.call"),
        row("reply lost", socket, client, f"{to}.reply", "drop"),
        row("reply garbled", socket, client, f"{to}.reply", "garbage"),
    ]


def _verifiers() -> Case:
    judge = VERIFIER, "verifier.judge"
    return Case(
        "verifier",
        (
            row("verifier hangs", "judging", *judge, "slow", seconds=600.0),
            row("verifier exits", "judging", *judge, "exit"),
            row("verifier floods memory", "judging", *judge, "hoard"),
            row(f"SIGSTOP {SUSPENDED_S:g} s verifier", "judging", *judge, "stop", seconds=SUSPENDED_S),
        ),
        ("rollout.reward.timeout_s=2",),
    )


def _clocks() -> Case:
    """Clocks of one process, and of all processes: the clocks of one machine jump together."""
    day = 86400.0
    often = {
        ROLLOUT: "rollout.running",
        SERVER: "server.load",
        MANAGER: "manager.journal",
        MODEL: "train.step",
        MASTER: "master.batch",
        VERIFIER: "verifier.judge",
    }
    rows = []
    for who in (ROLLOUT, SERVER, MANAGER, MODEL, MASTER):
        for seconds, what in ((day, "a day ahead"), (-day, "a day back")):
            label = f"clock of {who.removesuffix('/0')} jumps {what}"
            rows.append(row(label, "training", who, often[who], "jump", seconds=seconds))
    for seconds, what in ((day, "a day ahead"), (-2 * day, "a day back")):
        jumps = tuple(fault(who, point, "jump", seconds=seconds) for who, point in often.items())
        rows.append(Row(f"clock of the machine jumps {what}", "training", jumps))
    # Its incarnation must be newer than its predecessor's all the same.
    kill, back = fault(MASTER, "master.batch", "kill"), fault(MASTER, "worker.start", "jump", seconds=-day)
    rows.append(
        Row("SIGKILL master_worker, back with its clock a day back", "batch planning", (kill, back), in_order=True)
    )
    return Case("clock", tuple(rows))


def full(seed: int) -> list[Case]:
    """Everything, the longest runs first. One run of two goes over agents; the seed chooses which."""
    cases = _everything(seed)
    over = [number for number, case in enumerate(cases) if case.needs != "sglang"]
    drawn = random.Random(f"agents {seed}").sample(over, len(over) // 2)
    cases = [replace(case, nodes=2) if number in drawn else case for number, case in enumerate(cases)]
    return [*nodes.runs(random.Random(seed)), *cases]


def _everything(seed: int) -> list[Case]:
    """The faults of workers, disks and messages."""
    return [
        signals.sglang(),
        signals.two_ranks(),
        signals.lent_devices(),
        *signals.everybody(random.Random(seed)),
        _disk(),
        _messages(),
        signals.between(),
        signals.name_store(),
        signals.two_rollout_workers(),
        signals.reward_services(),
        _clocks(),
        *_disk_full(),
        _verifiers(),
    ]


def short() -> list[Case]:
    """A few of each kind, for `make test`."""
    kill = [
        *struck(ROLLOUT, ["push"], "kill"),
        *struck(SERVER, ["load"], "kill"),
        row("SIGKILL gserver_manager", "journal append", MANAGER, "manager.journal", "kill"),
        *struck(MODEL, ["train step"], "kill"),
        *struck(MASTER, ["publish"], "kill"),
        *struck(SERVER, ["stage"], "stop"),
    ]
    mixed = [
        ("disk", "shard, one bit flipped", "publish"),
        ("disk", "newest checkpoint one bit flipped, then SIGKILL model_worker", "checkpoint complete"),
        ("messages", "message lost", "push-pull"),
        ("messages", "notice twice", "request-reply"),
        ("messages", "stranger sends garbage", "manager HTTP"),
        ("verifier", "verifier exits", "judging"),
        ("clock", "clock of the machine jumps a day ahead", "training"),
    ]
    return [
        Case("short-signals", tuple(kill)),
        Case("short-mixed", tuple(_row_of(name, what, phase) for name, what, phase in mixed)),
        replace(_case_of("enospc"), name="short-full"),
        nodes.short(),
    ]


def chosen(cases: Sequence[Case], names: Sequence[str], faults: Sequence[str]) -> list[Case]:
    """The cases with one of ``names`` in theirs, and of them the rows with one of ``faults`` in "fault, phase"."""

    def wanted(text: str, parts: Sequence[str]) -> bool:
        return not parts or any(part in text for part in parts)

    named = [case for case in cases if wanted(case.title, names)]
    cut = [replace(c, rows=tuple(r for r in c.rows if wanted(f"{r.fault}, {r.phase}", faults))) for c in named]
    return [case for case in cut if case.rows]


def _case_of(name: str) -> Case:
    return next(case for case in _everything(0) if case.name == name)


def _row_of(name: str, what: str, phase: str) -> Row:
    return next(found for found in _case_of(name).rows if (found.fault, found.phase) == (what, phase))
