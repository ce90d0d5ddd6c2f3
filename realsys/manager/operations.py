"""The operations of the manager: one table that client, HTTP routes and commit loop follow.

    ManagerClient ──path, struct──> ManagerApp ──> ManagerService.call ──decide──> ManagerState
                                                        │
                          hold until settled ──> append events ──> wake ──> fsync ──> reply

A further operation is one row here and the function that decides it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from realsys.manager import messages as m
from realsys.manager.messages import EvaluationReply

if TYPE_CHECKING:  # a client needs the table, not the state that decides
    from realsys.manager.decisions import ManagerState

SCHEDULE_WAIT_S = 2.0  # a schedule request waits this long for a server to become routable

Request = TypeVar("Request")
Reply = TypeVar("Reply")


def _always(*_: object) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Operation(Generic[Request, Reply]):
    """One call of the manager.

    path      of the URL; the part in braces is the request of a GET
    request   struct of a POST's body; ``str`` or ``NoneType`` for a GET
    decide    pure: (state, request, unix seconds) -> reply; raises Refusal
    settled   False: the call is held, up to ``held_s`` seconds, and decided again whenever something changes
    caller    name of the worker whose call is held; the wait ends with its heartbeat
    grants    whether a held call waits for tickets; any other one waits for a server
    syncs     whether the reply waits for an fsync of the journal
    secret    whether a GET needs the token; a POST always does
    trainer   whether the caller is a trainer: status 409 says that a younger one has started (``monotonic``)
    refresh   whether the published version is read from the name store first, because a watch may lag behind
    log_line  message for the log of the process after the call
    """

    path: str
    request: type[Request]
    reply: type[Reply]
    decide: Callable[[ManagerState, Request, float], Reply]
    settled: Callable[[Reply], bool] = _always
    held_s: Callable[[Request], float] = lambda _: 0.0
    caller: Callable[[Request], str] = lambda _: ""
    grants: bool = False
    syncs: Callable[[Request], bool] = lambda _: False
    secret: bool = False
    trainer: bool = False
    refresh: bool = False
    log_line: Callable[[Request, Reply], str] | None = None

    @property
    def is_post(self) -> bool:
        """True for a call with a body: it changes the state."""
        return self.request not in (str, type(None))

    def url_path(self, request: Request) -> str:
        """Return the path with the request of a GET in the place of its braces."""
        return self.path if self.is_post or request is None else self.path.partition("{")[0] + str(request)


ALLOCATE = Operation(
    path="/allocate_rollout",
    request=m.AllocateRequest,
    reply=m.AllocateReply,
    decide=lambda state, request, now: state.allocate(request, now),
    settled=lambda reply: bool(reply.tickets) or reply.reason == "superseded",
    held_s=lambda request: min(request.wait_s, m.MAX_WAIT_S),
    caller=lambda request: request.worker,
    grants=True,
)
SCHEDULE = Operation(
    path="/schedule_request",
    request=m.ScheduleRequest,
    reply=m.ScheduleReply,
    decide=lambda state, request, now: state.schedule(request, now),
    held_s=lambda _: SCHEDULE_WAIT_S,
)
TOUCH = Operation(
    path="/touch",
    request=m.TouchRequest,
    reply=m.TouchReply,
    decide=lambda state, request, now: state.touch(request, now),
)
FINISH = Operation(
    path="/finish_rollout",
    request=m.FinishRequest,
    reply=m.FinishReply,
    decide=lambda state, request, now: state.finish(request, now),
)
SUBMIT = Operation(
    path="/submit",
    request=m.SubmitRequest,
    reply=m.SubmitReply,
    decide=lambda state, request, now: state.submit(request, now),
    syncs=_always,  # also a repetition: the first call may have ended before its record was on the disk
    trainer=True,
)
CLAIM = Operation(
    path="/claim",
    request=m.ClaimRequest,
    reply=m.ClaimReply,
    decide=lambda state, request, now: state.claim(request, now),
    trainer=True,
)
TRAINED = Operation(
    path="/trained",
    request=m.TrainedRequest,
    reply=m.TrainedReply,
    decide=lambda state, request, now: state.trained(request, now),
    # A repeated call, too: the first one may have ended before its records were on the disk.
    syncs=lambda request: bool(request.trained or request.dropped or request.stale),
    trainer=True,
)
ROLL_BACK = Operation(
    path="/roll_back",
    request=m.RollBackRequest,
    reply=m.RollBackReply,
    decide=lambda state, request, now: state.roll_back(request, now),
    syncs=_always,  # the incarnation that this one replaces stays replaced though the machine dies
    trainer=True,
    log_line=lambda request, reply: (
        f"trainer {request.incarnation} starts from version {request.version}: {reply.reissued} tickets reissued"
    ),
)
DEVICES = Operation(
    path="/devices",
    request=m.DevicesRequest,
    reply=m.DevicesReply,
    decide=lambda state, request, now: state.move_devices(request, now),
    settled=lambda reply: reply.done,
    held_s=lambda request: min(request.wait_s, m.MAX_WAIT_S),
    trainer=True,
    refresh=True,
)
EVALUATE = Operation(
    path="/evaluate",
    request=m.EvaluateRequest,
    reply=m.EvaluateReply,
    decide=lambda state, request, now: state.evaluate(request, now),
    trainer=True,
    refresh=True,
)
PIN = Operation(
    path="/pin",
    request=m.PinRequest,
    reply=m.PinReply,
    decide=lambda state, request, now: state.pin(request, now),
    syncs=_always,  # agents may have met the version already
    trainer=True,
    refresh=True,
    log_line=lambda request, reply: f"version {reply.version} is pinned as {request.name}",
)
UNPIN = Operation(
    path="/unpin",
    request=m.PinRequest,
    reply=m.PinReply,
    decide=lambda state, request, now: state.unpin(request, now),
    syncs=_always,
    trainer=True,
    log_line=lambda request, reply: f"version {reply.version} is not pinned as {request.name} any more",
)
CANCEL_EVALUATION = Operation(
    path="/cancel_evaluation",
    request=m.CancelRequest,
    reply=m.CancelReply,
    decide=lambda state, request, now: state.cancel_evaluation(request, now),
    log_line=lambda request, reply: f"evaluation {request.eval_id} cancelled by its user: {reply.cancelled}",
)
EVALUATION = Operation(
    path="/evaluate/{eval_id}",
    request=str,
    reply=m.EvaluationReply,
    decide=lambda state, eval_id, _: state.evaluations.find(eval_id).reply(),
)
DATA_POSITION = Operation(
    path="/data_position",
    request=type(None),
    reply=m.DataPosition,
    decide=lambda state, *_: state.ledger.position(),
    syncs=_always,  # the checkpoint that holds it must not be ahead of the journal
    secret=True,
)
VERSION = Operation(
    path="/get_model_version",
    request=type(None),
    reply=m.VersionReply,
    decide=lambda state, *_: m.VersionReply(state.version),
)
HEALTH = Operation(path="/health", request=type(None), reply=dict[str, str], decide=lambda *_: {"status": "ok"})
STATUS = Operation(
    path="/status",
    request=type(None),
    reply=dict[str, Any],
    decide=lambda state, _, now: status(state, now, state.started),
)
_OF_WORKERS = (ALLOCATE, SCHEDULE, TOUCH, FINISH)
_OF_TRAINER = (ROLL_BACK, SUBMIT, CLAIM, TRAINED, DEVICES, EVALUATE, PIN, UNPIN)
_OF_USERS = (CANCEL_EVALUATION,)
_READS = (EVALUATION, DATA_POSITION, VERSION, HEALTH, STATUS)
OPERATIONS: tuple[Operation[Any, Any], ...] = (*_OF_WORKERS, *_OF_TRAINER, *_OF_USERS, *_READS)


# ---- GET /status: the state of the manager as plain data for JSON, the page and the metrics


def status(state: ManagerState, now: float, started: float) -> dict[str, Any]:
    """Return the body of GET /status. Times in seconds, rates per second."""
    published = state.servers.published
    return {
        "time": now,
        "uptime_s": now - started,
        "phase": state.master.get("phase"),
        "step": state.master.get("step", published.step if published else 0),
        "total_steps": state.settings.total_steps,
        "version": state.version,
        "max_staleness": state.bound.eta,
        "master": state.master,
        "admission": admission(state),
        "servers": servers(state, now),
        "devices": {"turn": state.servers.lending.turn, "reason": state.servers.lending.reason},
        "pins": pins(state),
        "rollout": weight_updates(state),
        "workers": workers(state, now),
        "blame": {"suspects": state.servers.reports.suspects(now), "ignored": state.servers.reports.ignored},
        "ledger": ledger(state),
        "prompts": state.ledger.rates.shares(),
        "staleness": staleness(state),
        "throughput": {
            "generated_tokens_per_s": state.throughput.tokens.rate(now),
            "generated_tokens": state.throughput.tokens.total,
            "finished_groups_per_s": state.throughput.groups.rate(now),
            "answers": dict(state.throughput.finish_reasons),
            "train_tokens_per_s": state.master.get("train_tokens_per_s"),
            "consumed_tokens_per_s": state.master.get("consumed_tokens_per_s"),
        },
        "time_split": state.master.get("seconds"),
        "agreement": state.master.get("agreement"),
        "kept_keys_fraction": state.master.get("kept_keys_fraction"),
        "untrained": {key: state.master.get(key) for key in ("untrained", "too_old", "length_ks")},
        "evaluations": evaluations(state),
        **({"gpu": gpu} if (gpu := state.master.get("gpu")) else {}),
    }


def admission(state: ManagerState) -> dict[str, Any]:
    """Return the head-room of the staleness bound, and why nothing is granted if nothing is."""
    counted, version = state.ledger.counted, state.version
    capacity = state.bound.capacity(version) if state.servers.published else 0
    reason = state.refusal()
    return {
        "batch_groups": state.bound.batch_groups,
        "counted": counted,
        "capacity": capacity,
        "headroom": state.bound.headroom(counted, version),
        "admits": reason is None,
        "reason": reason,
        "explanation": explain(state),
    }


def explain(state: ManagerState) -> str:
    """Return one line on why no rollout is granted."""
    match state.refusal():
        case None:
            return "granting"
        case "staleness":
            needed = state.bound.oldest_weights(state.ledger.counted + 1)
            awaited = "the next version" if needed > state.version else f"a server that serves version {needed}"
            return (
                f"{state.ledger.counted} groups are granted and not given back; at version {state.version} and "
                f"max_staleness {state.bound.eta} the bound is {state.bound.capacity(state.version)}: "
                f"waiting for {awaited}"
            )
        case "exhausted":
            open_ = state.ledger.counts.open
            return f"every group that is needed is granted; {open_['running']} running, {open_['finished']} finished"
        case "nothing_submitted":
            total = state.ledger.total_submitted
            return f"the training script has submitted {total} prompts, and all are granted: waiting for more"
        case "paused" if not state.settings.trains:
            return "the run trains on no prompts of its own: evaluations alone get tickets"
        case "paused":
            return "the master says the trial is done"
        case "no_server":
            return state.servers.explain()
        case "asleep":
            return "the other servers have their share of the groups: waiting for the lent servers to wake"


def servers(state: ManagerState, now: float) -> list[dict[str, Any]]:
    """Return one row per registered server."""
    rows = []
    for server in state.servers.all():
        sequences, tokens = state.reservations.load(server.name)
        rate = state.throughput.by_server.get(server.name)
        rows.append(
            {
                "name": server.name,
                "url": server.address.url,
                "host": server.address.host,
                "pid": server.address.pid,
                "incarnation": server.address.incarnation,
                "state": server.state,
                "version": server.verified.version if server.verified else None,
                "target": server.target.version if server.target else None,
                "updating_s": now - server.began if server.began is not None else None,
                "running": sequences,
                "reserved_tokens": tokens,
                "tokens_per_s": rate.rate(now) if rate else 0.0,
                "updates": server.updates,
                "update_s": server.update_s,
                "timings": server.timings,
                "load": server.load or None,
                "failures": server.failures,
                "error": server.error,
            }
        )
    return rows


def pins(state: ManagerState) -> dict[str, Any]:
    """Return the pinned versions by name, each with the servers that have it for agents now."""
    names = {server.name: server for server in state.servers.all()}
    return {
        name: {
            "version": held.version,
            "servers": [server for server in names if state.servers.samples(names[server], held)],
        }
        for name, held in sorted(state.evaluations.pins.items())
    }


def weight_updates(state: ManagerState) -> dict[str, Any]:
    """Return pace and progress of the weight updates, and the last ones, newest first."""
    pace, published = state.settings.pace, state.servers.published
    return {
        "mode": "rolling" if pace.fraction < 1 else "all_at_once",
        "fraction": pace.fraction,
        "at_newest": sum(server.verified == published for server in state.servers.all()) if published else 0,
        "servers": len(state.servers.all()),
        "failures": state.servers.updates.failures,
        "updates": [record.row() for record in reversed(state.servers.updates.recent)],
    }


def workers(state: ManagerState, now: float) -> list[dict[str, Any]]:
    """Return one row per heartbeat key."""
    running = Counter(ticket.worker for ticket in state.ledger.running())
    memory = state.memory()
    return [
        {
            "name": name,
            "kind": beat.kind,
            "index": beat.index,
            "host": beat.host,
            "pid": beat.pid,
            "incarnation": beat.incarnation,
            "state": beat.state,
            "up_s": now - beat.since,
            "unchanged_s": now - beat.changed,
            "running": running.get(name, 0),
            "memory_bytes": memory.get(name),
            "refused": {what: count for what, count in beat.counters.items() if count},
        }
        for name, beat in sorted(state.workers.items())
    ]


def ledger(state: ManagerState) -> dict[str, Any]:
    """Return tickets by state, drops by reason, reissues by cause."""
    counts = state.ledger.counts
    return {
        "inherited": counts.inherited,
        "granted": counts.granted,
        "attempts": counts.attempts,
        **counts.by_state(),
        "dropped_by_reason": {reason: n for reason, n in counts.dropped_by_reason.items() if n},
        "last_failure": state.throughput.last_failure,
        "reissued_by_cause": dict(counts.reissued_by_cause),
        "epoch": state.ledger.epoch,
        "starts": counts.starts,
        "trainer_incarnation": state.trainer_incarnation,
    }


def staleness(state: ManagerState) -> dict[str, Any]:
    """Return the staleness of trained sequences, summed over the last steps and step by step."""
    total: Counter[str] = Counter()
    for step in state.staleness:
        total.update(step.histogram)
    return {
        "histogram": dict(sorted(total.items(), key=lambda item: (len(item[0]), item[0]))),
        "steps": [{"step": s.step, "version": s.version, "histogram": s.histogram} for s in state.staleness],
    }


def evaluations(state: ManagerState) -> dict[str, Any]:
    """Return progress and result of each evaluation."""
    running = Counter(problem.evaluation.started.eval_id for problem in state.evaluations.running.values())
    return {
        eval_id: {
            "split": evaluation.started.split,
            "running": running[eval_id],
            **_without_details(evaluation.reply()),
        }
        for eval_id, evaluation in state.evaluations.by_id.items()
    }


def _without_details(reply: EvaluationReply) -> dict[str, Any]:
    """Return the fields of a reply that do not grow with the number of problems."""
    return {key: value for key, value in msgspec.structs.asdict(reply).items() if key not in ("tallies", "accepted")}
