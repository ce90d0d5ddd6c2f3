"""The operations of the manager: one table that client, HTTP routes and commit loop follow.

    ManagerClient ──path, struct──> ManagerApp ──> ManagerService.call ──decide──> ManagerState
                                                        │
                          hold until settled ──> append events ──> wake ──> fsync ──> reply

A further operation is one row here and the function that decides it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from realsys.manager import messages as m
from realsys.manager.decisions import ManagerState
from realsys.manager.status import status

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
    decide=ManagerState.allocate,
    settled=lambda reply: bool(reply.tickets) or reply.reason == "superseded",
    held_s=lambda request: min(request.wait_s, m.MAX_WAIT_S),
    caller=lambda request: request.worker,
    grants=True,
)
SCHEDULE = Operation(
    path="/schedule_request",
    request=m.ScheduleRequest,
    reply=m.ScheduleReply,
    decide=ManagerState.schedule,
    held_s=lambda _: SCHEDULE_WAIT_S,
)
TOUCH = Operation(path="/touch", request=m.TouchRequest, reply=m.TouchReply, decide=ManagerState.touch)
FINISH = Operation(path="/finish_rollout", request=m.FinishRequest, reply=m.FinishReply, decide=ManagerState.finish)
CLAIM = Operation(path="/claim", request=m.ClaimRequest, reply=m.ClaimReply, decide=ManagerState.claim, trainer=True)
TRAINED = Operation(
    path="/trained",
    request=m.TrainedRequest,
    reply=m.TrainedReply,
    decide=ManagerState.trained,
    # A repeated call, too: the first one may have ended before its records were on the disk.
    syncs=lambda request: bool(request.trained or request.dropped or request.stale),
    trainer=True,
)
ROLL_BACK = Operation(
    path="/roll_back",
    request=m.RollBackRequest,
    reply=m.RollBackReply,
    decide=ManagerState.roll_back,
    syncs=_always,  # the incarnation that this one replaces stays replaced though the machine dies
    trainer=True,
    log_line=lambda request, reply: (
        f"trainer {request.incarnation} starts from version {request.version}: {reply.reissued} tickets reissued"
    ),
)
EVALUATE = Operation(
    path="/evaluate",
    request=m.EvaluateRequest,
    reply=m.EvaluateReply,
    decide=ManagerState.evaluate,
    trainer=True,
    refresh=True,
)
CANCEL_EVALUATION = Operation(
    path="/cancel_evaluation",
    request=m.CancelRequest,
    reply=m.CancelReply,
    decide=ManagerState.cancel_evaluation,
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
_OF_TRAINER = (ROLL_BACK, CLAIM, TRAINED, EVALUATE)
_OF_USERS = (CANCEL_EVALUATION,)
_READS = (EVALUATION, DATA_POSITION, VERSION, HEALTH, STATUS)
OPERATIONS: tuple[Operation[Any, Any], ...] = (*_OF_WORKERS, *_OF_TRAINER, *_OF_USERS, *_READS)
