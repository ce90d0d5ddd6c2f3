"""Bodies of the GserverManager's HTTP calls, all JSON. Shared by the manager, the RolloutWorkers and the master."""

from __future__ import annotations

import uuid
from typing import Annotated, Literal

import msgspec

from realsys.manager.ledger.events import Number, OrNone, Outcome
from realsys.types import FinishReason, Ticket

MOST_RELEASED = 256  # calls in one schedule request; the others are named in the next one
MOST_METRICS = 64  # names per answer

Refusal = Literal["staleness", "exhausted", "no_server", "paused"]
Identifier = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
#: Nanoseconds of its start, with zeros in front, so that lexical order is age; what has another form fits in no order.
TrainingIncarnation = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{19}$")]
Text = Annotated[str, msgspec.Meta(max_length=8192)]
Count = Annotated[int, msgspec.Meta(ge=0)]
CallName = Annotated[str, msgspec.Meta(max_length=64)]
#: Numbers by name, of one answer or as means over answers.
Metrics = Annotated[dict[str, float], msgspec.Meta(max_length=MOST_METRICS)]


class AllocateRequest(msgspec.Struct):
    """POST /allocate_rollout: held up to ``wait_s`` (at most 10 s) until something can be granted.

    Sent again with the same ``request_id`` (its reply was lost), it gets the tickets it got, if they still run.
    """

    worker: Identifier
    max_tickets: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    wait_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    request_id: Annotated[str, msgspec.Meta(max_length=64)] = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    incarnation: Annotated[str, msgspec.Meta(max_length=64)] = ""  # of the worker: its successor does not have them


class AllocateReply(msgspec.Struct):
    """``reason`` says why there are no tickets; ask again after ``retry_after_s``."""

    tickets: list[Ticket]
    reason: Refusal | None = None
    retry_after_s: float = 0.0


class ScheduleRequest(msgspec.Struct):
    """POST /schedule_request: which server to generate on. Asking again for the same call moves its reservation.

    ``prefix``: hashes of the prompt's leading blocks (``routing.prefix``), for servers that may hold them.
    ``call``: name of the call, unique in its attempt; a ticket may have several calls under way.
    ``previous``: (server, version) of the episode's call before, whose server may have these tokens in its cache.
    ``released``: (ticket, attempt, call) of calls of this worker that have ended since its last request.
    """

    ticket_id: Identifier
    attempt: Count
    prompt_len: Count
    max_new_tokens: Count
    n: Annotated[int, msgspec.Meta(ge=1)] = 1
    failed_server: str | None = None
    failure: Text | None = None
    prefix: Annotated[list[int], msgspec.Meta(max_length=64)] = []
    call: CallName = ""
    previous: tuple[str, int] | None = None
    released: Annotated[list[tuple[Identifier, Count, CallName]], msgspec.Meta(max_length=MOST_RELEASED)] = []


class ScheduleReply(msgspec.Struct):
    """``version`` is what the server has proved to serve."""

    server: str
    url: str
    version: int


class Answer(msgspec.Struct):
    """What the manager keeps of one answer, which is an episode.

    ``correct``: None if the task has no right or wrong. ``length``: sampled tokens that are trained, of all its rows.
    ``metrics``: averaged by name over the answers of an evaluation.
    """

    reward: float
    correct: bool | None
    length: Count
    finish_reason: FinishReason
    version_min: OrNone
    version_max: OrNone
    metrics: Metrics = {}


class FinishRequest(msgspec.Struct):
    """POST /finish_rollout: the end of one attempt; releases its reservations.

    ``servers``: server -> tokens it sampled for the answers, for the rates per server.
    """

    ticket_id: Identifier
    attempt: Count
    worker: Identifier
    outcome: Outcome
    reason: Text | None = ""
    answers: list[Answer] = []
    servers: dict[str, Count] = {}

    def versions(self) -> tuple[int, int]:
        """Of the oldest and the newest token of all answers; -1 if there is none."""
        low = min((answer.version_min for answer in self.answers), default=-1)
        return low, max((answer.version_max for answer in self.answers), default=-1)


class FinishReply(msgspec.Struct):
    """``known`` False: the attempt was superseded or never granted. ``retry``: there will be another attempt."""

    known: bool
    retry: bool = False


class RollBackRequest(msgspec.Struct):
    """POST /roll_back: the training side ``incarnation`` starts and goes on from ``version``; -1: from nothing.

    Idempotent per incarnation. Status 409 for an incarnation older than the one known: its sender must end.
    ``checkpoint``: its folder, for people; "" when there is none.
    """

    version: OrNone
    step: Annotated[int, msgspec.Meta(ge=-1)]
    incarnation: TrainingIncarnation
    checkpoint: Text = ""


class RollBackReply(msgspec.Struct):
    """``reissued``: tickets that were running, buffered or trained later, and wait for another attempt now.

    ``evaluations``: all that were ever asked for, forgotten or not: one without a result is to be asked for again.
    """

    reissued: int
    evaluations: list[str] = []


class ClaimRequest(msgspec.Struct):
    """POST /claim, idempotent: ``tickets`` are to be trained, to be in ``version``.

    ``incarnation``: of the training side that speaks; status 409 if it is older than the one that rolled back last.
    """

    version: Number
    tickets: list[Identifier]
    incarnation: Annotated[str, msgspec.Meta(max_length=128)] = ""


class ClaimReply(msgspec.Struct):
    """``gone``: those that have ended otherwise, and must not be trained; then nothing is claimed.

    If there are none, all of them end by this training and by nothing else.
    """

    gone: list[str]


class TrainedRequest(msgspec.Struct):
    """POST /trained, idempotent. A drop for a reason that starts with "stale" gives the prompt a fresh ticket.

    ``incarnation``: of the training side that speaks; status 409 if it is older than the one that rolled back last.
    ``oldest``: for each ticket of ``trained`` the version of its oldest token, or empty.
    ``held``: (ticket, attempt) of every complete group that the master has (buffered, in training), those of this
    call aside; what finished a while ago and is not held, in whichever attempt, never arrived and is re-issued. None:
    nothing is said of it.
    """

    step: int
    version: Number
    trained: list[Identifier] = []  # all of them claimed before
    dropped: list[tuple[Identifier, Text]] = []
    staleness: dict[str, Count] = {}  # versions behind -> sequences, of this step
    incarnation: Annotated[str, msgspec.Meta(max_length=128)] = ""
    oldest: list[OrNone] = []
    held: list[tuple[Identifier, Count]] | None = None


class TrainedReply(msgspec.Struct):
    """How many of the named tickets changed state (0 for a repetition); ``lost``: never arrived and re-issued."""

    trained: int
    dropped: int
    lost: list[str] = []


class EvaluateRequest(msgspec.Struct):
    """POST /evaluate: answer the first ``n`` problems of ``split`` once each. The same id again changes nothing.

    ``incarnation``: of the training side that asks; status 409 if it is older than the one that rolled back last: its
    weights are gone.
    """

    eval_id: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    split: Identifier
    n: Annotated[int, msgspec.Meta(ge=1)]
    seed: Count = 0
    incarnation: Annotated[str, msgspec.Meta(max_length=128)] = ""


class EvaluateReply(msgspec.Struct):
    total: int


class EvaluationReply(msgspec.Struct):
    """GET /evaluate/{eval_id}. Complete when ``done + failed == total``.

    done         problems that were answered
    accuracy     share of right completions among those that are right or wrong, None if there are none
    reward_mean  over all completions, None if there are none; a failure is not a wrong completion
    metrics      mean of each metric over the completions that have it
    """

    done: int
    total: int
    failed: int
    accuracy: float | None
    reward_mean: float | None
    length_mean: float
    version_min: int
    version_max: int
    metrics: dict[str, float] = {}


class VersionReply(msgspec.Struct):
    """GET /get_model_version; -1: nothing published yet."""

    version: int


class DataPosition(msgspec.Struct, frozen=True):
    """GET /data_position, with the token: where in the data training is, for a checkpoint.

    ``cursor`` is the position of the next new prompt in the order of ``prompts`` prompts that ``seed`` makes;
    ``pending`` are the prompts (indices) granted before it and not trained, in the order to issue them again.
    """

    cursor: Count
    pending: list[Count]
    prompts: Annotated[int, msgspec.Meta(ge=1)]
    seed: int
