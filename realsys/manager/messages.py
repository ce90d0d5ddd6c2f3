"""Bodies of the GserverManager's HTTP calls, all JSON, and its refusals; for manager, RolloutWorkers and master."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np

from realsys.manager.ledger.events import MOST_SAMPLES, Index, Number, Order, OrNone, Outcome, Rate
from realsys.types import FinishReason, PublishedVersion, Ticket

MAX_WAIT_S = 10.0  # an allocation is never held longer
#: stale_policy=drop: times that a prompt is issued again before its old tokens are masked. A third try would be
#: too old, too, because its completions take longer than max_staleness steps.
MAX_REISSUES = 2
MAX_TICKETS = 4096  # per allocation, and prompts per submission
MOST_RELEASED = 256  # calls in one schedule request; the worker names the rest in its next one
MOST_METRICS = 64  # names per completion
BLOCK = 64  # tokens; engines share prefixes in whole pages, so smaller blocks would find no more
MAX_BLOCKS = 32  # hashes per request
LONGEST_PIN = 64  # characters
POLICY = "policy"  # name of the policy in training if an agent gives its model none

RefusalReason = Literal["staleness", "exhausted", "nothing_submitted", "no_server", "asleep", "paused"]
Identifier = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
#: Incarnation of a trainer that may be unknown: "" before the first has rolled back.
AnyIncarnation = Annotated[str, msgspec.Meta(max_length=128)]
#: Nanoseconds of the trainer's start, zero-padded, so that lexical order is age. Another form would not be ordered.
TrainerIncarnation = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{19}$")]
ShortName = Annotated[str, msgspec.Meta(max_length=64)]
Text = Annotated[str, msgspec.Meta(max_length=8192)]
Count = Annotated[int, msgspec.Meta(ge=0)]
#: Numbers by name: of one completion, or means over completions.
Metrics = Annotated[dict[str, float], msgspec.Meta(max_length=MOST_METRICS)]


class AllocateRequest(msgspec.Struct):
    """POST /allocate_rollout: held up to ``wait_s`` (at most MAX_WAIT_S) until something can be granted.

    When a reply is lost, the worker repeats the call with the same ``request_id``, and the reply holds those of its
    tickets that still run. Another ``request_id`` ends the calls before it: no tickets are granted to them any more.
    ``incarnation`` of the worker: its tickets are lost when another incarnation takes its name.
    """

    worker: Identifier
    max_tickets: Annotated[int, msgspec.Meta(ge=1, le=MAX_TICKETS)]
    wait_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    request_id: ShortName = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    incarnation: ShortName = ""


class AllocateReply(msgspec.Struct):
    """``reason`` says why there are no tickets; ask again after ``retry_after_s``."""

    tickets: list[Ticket]
    reason: RefusalReason | Literal["superseded"] | None = None
    retry_after_s: float = 0.0


class ScheduleRequest(msgspec.Struct):
    """POST /schedule_request: choose the server of a call. The same call again moves its reservation.

    call      name of the call, unique in its attempt; an agent may have several calls under way
    prefix    ``prefix_hashes`` of the prompt, for servers that may hold its leading blocks
    previous  (server, version) of the episode's last call, whose server may have these tokens in its cache
    released  (ticket, attempt, call) of this worker's calls that have ended since its last request
    avoid     server that is too busy for the call: chosen only if no other may serve it
    policy    name of the pinned version that must sample the call; "": the policy in training
    or_trained  a ``policy`` that is not pinned is the policy in training: agents give their model any name
    """

    ticket_id: Identifier
    attempt: Count
    prompt_len: Count
    max_new_tokens: Count
    n: Annotated[int, msgspec.Meta(ge=1)] = 1
    failed_server: str | None = None
    failure: Text | None = None
    prefix: Annotated[list[int], msgspec.Meta(max_length=64)] = []
    call: ShortName = ""
    previous: tuple[str, int] | None = None
    released: Annotated[list[tuple[Identifier, Count, ShortName]], msgspec.Meta(max_length=MOST_RELEASED)] = []
    avoid: str | None = None
    policy: ShortName = ""
    or_trained: bool = False


def prefix_hashes(tokens: Sequence[int]) -> list[int]:
    """Return a 32-bit hash of each prefix of whole blocks, shortest first, and last of the whole prompt.

    Equal prompts get equal lists; prompts that share their first k blocks share the first k hashes.
    """
    data = np.asarray(tokens, np.int32).tobytes()
    step = 4 * BLOCK
    hashes, running = [], 0
    for start in range(0, min(len(data), MAX_BLOCKS * step) - step + 1, step):
        running = zlib.crc32(data[start : start + step], running)
        hashes.append(running)
    whole = zlib.crc32(data)
    return hashes if hashes and hashes[-1] == whole else [*hashes, whole]


class ScheduleReply(msgspec.Struct):
    """The server to generate on; ``version`` is the one that it has verified, ``policy`` its name if it is pinned."""

    server: str
    url: str
    version: int
    policy: str = ""


class Answer(msgspec.Struct):
    """The manager's record of one completion, which is an episode.

    ``correct``: None if the task has no right or wrong. ``length``: sampled tokens that are trained, of all rows.
    ``metrics``: averaged by name over the completions of an evaluation.
    """

    reward: float
    correct: bool | None
    length: Count
    finish_reason: FinishReason
    version_min: OrNone
    version_max: OrNone
    metrics: Metrics = {}


class TouchRequest(msgspec.Struct):
    """POST /touch: ``worker`` still works on the attempts ``running``, (ticket, attempt). Renews their leases.

    ``memory_bytes``: resident memory of the worker; 0: it does not say.
    """

    worker: Identifier
    running: list[tuple[Identifier, Count]]
    memory_bytes: Count = 0


class TouchReply(msgspec.Struct):
    """``over``: tickets whose attempt has been superseded, or is another worker's."""

    over: list[str] = []


class FinishRequest(msgspec.Struct):
    """POST /finish_rollout: the end of one attempt; releases its reservations.

    ``answers``: those that are trained. ``servers``: server -> tokens that it sampled for the completions, for the
    rates per server. Of the worker's verifiers: completions that wait for a verdict now, and completions without one
    since its start. ``lost_tokens``: reason -> tokens of each of the worker's episodes that are not trained, since its
    last finish. ``verdict_failures``: cause -> completions whose verifier failed or exceeded its limit, since then.
    ``correct``, ``judged``: episodes of this ticket that solved the task, and that solved it or did not; the ones that
    are not trained included. ``memory_bytes``: resident memory of the worker; 0: it does not say.
    """

    ticket_id: Identifier
    attempt: Count
    worker: Identifier
    outcome: Outcome
    reason: Text | None = ""
    answers: list[Answer] = []
    servers: dict[str, Count] = {}
    verdicts_waiting: Count = 0
    verdicts_undecided: Count = 0
    lost_tokens: dict[ShortName, list[Count]] = {}
    verdict_failures: dict[str, Count] = {}
    correct: Number = 0
    judged: Number = 0
    memory_bytes: Count = 0

    def versions(self) -> tuple[int, int]:
        """Return the versions of the oldest and the newest token of all completions; -1 without completions."""
        low = min((answer.version_min for answer in self.answers), default=-1)
        return low, max((answer.version_max for answer in self.answers), default=-1)


class FinishReply(msgspec.Struct):
    """``known`` False: the attempt was superseded or never granted. ``retry``: another attempt follows."""

    known: bool
    retry: bool = False


class RollBackRequest(msgspec.Struct):
    """POST /roll_back: the trainer ``incarnation`` starts from ``version``; -1: from nothing.

    Idempotent per incarnation. Status 409 for an older incarnation than the known one: that trainer must end.
    ``checkpoint``: its folder, for the log; "" without one.
    """

    version: OrNone
    step: Annotated[int, msgspec.Meta(ge=-1)]
    incarnation: TrainerIncarnation
    checkpoint: Text = ""


class RollBackReply(msgspec.Struct):
    """``reissued``: tickets that ran, were buffered or were trained later, and wait for their next attempt now.

    ``evaluations``: every evaluation that a trainer ever started; the trainer restarts those without a result.
    ``pins``: pinned versions by name, also of earlier trainers, which the trainer must not prune.
    """

    reissued: int
    evaluations: list[str] = []
    pins: dict[str, PublishedVersion] = {}


class SubmitRequest(msgspec.Struct):
    """POST /submit: with ``data.order=script``, the next prompts to roll out, by their numbers.

    ``start``: position of the first one in the whole sequence of the trial, from 0. Idempotent: a repetition of known
    positions changes nothing. Without ``prompts`` the call only asks for the length of the sequence. ``incarnation`` of
    the trainer: status 409 if it is older than the one that rolled back last.
    """

    incarnation: TrainerIncarnation
    start: Index = 0
    prompts: Annotated[list[Index], msgspec.Meta(max_length=MAX_TICKETS)] = []


class SubmitReply(msgspec.Struct):
    """``total``: prompts ever submitted. The first ``cursor`` of them have been granted."""

    total: int
    cursor: int = 0


class ClaimRequest(msgspec.Struct):
    """POST /claim, idempotent (``claim-before-train``): the trainer is about to train ``tickets`` into ``version``.

    ``incarnation`` of the trainer: status 409 if it is older than the one that rolled back last.
    """

    version: Number
    tickets: list[Identifier]
    incarnation: AnyIncarnation = ""


class ClaimReply(msgspec.Struct):
    """``gone``: tickets that have ended and must not be trained; then none of the batch is claimed.

    If it is empty, all of them are claimed: they end by this training and by nothing else.
    """

    gone: list[str]


class PinRequest(msgspec.Struct):
    """POST /pin: keep the newest published version as ``name``; agents may play against it while training goes on.

    The same name again gets the version that is newest then, and the same call again changes nothing before another
    one is published. POST /unpin, with the same body, ends it. ``incarnation`` of the trainer: status 409 if it is
    older than the one that rolled back last.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=LONGEST_PIN)]
    incarnation: AnyIncarnation = ""


class PinReply(msgspec.Struct):
    """``version`` that has the name, or had it until /unpin; -1: none."""

    version: int


class DevicesRequest(msgspec.Struct):
    """POST /devices, idempotent: whether servers or trainer may use the devices that they share.

    The trainer may compute when the reply says ``done``; until then it repeats the call, which is held up to
    ``wait_s`` (at most MAX_WAIT_S). ``batch``: a batch is ready; False: the trainer needs the devices all the same,
    to load its models.
    """

    incarnation: TrainerIncarnation
    turn: Literal["trainer", "servers"]
    batch: bool = True
    wait_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class DevicesReply(msgspec.Struct):
    """``reason``: why the turn has changed, or what it waits for."""

    done: bool
    reason: str = ""


class TrainedRequest(msgspec.Struct):
    """POST /trained, idempotent.

    trained      tickets that the step trained; all claimed before
    dropped      (ticket, reason) of groups that are not trained
    stale        (ticket, attempt) of groups that were too old: their tickets are issued again
    staleness    versions behind -> sequences, of this step
    incarnation  of the trainer: status 409 if it is older than the one that rolled back last
    oldest       for each trained ticket the version of its oldest token, or empty
    held         (ticket, attempt) of every complete group that the master has, without those of this call. A group
                 that finished a while ago and is not held, in whichever attempt, never arrived: it is reissued.
                 None: the master does not say.
    """

    step: int
    version: Number
    trained: list[Identifier] = []
    dropped: list[tuple[Identifier, Text]] = []
    staleness: dict[str, Count] = {}
    incarnation: AnyIncarnation = ""
    oldest: list[OrNone] = []
    held: list[tuple[Identifier, Count]] | None = None
    stale: list[tuple[Identifier, Count]] = []


class TrainedReply(msgspec.Struct):
    """Number of the named tickets that changed state (0 for a repetition); ``lost``: never arrived and reissued.

    ``lost_tokens``: reason -> tokens of episodes that workers did not push, since the manager's start.
    ``lost_lengths``: tokens of a completion, rounded -> such completions that did not fail. ``verdict_failures``: cause
    -> completions whose verifier failed or exceeded its limit, since then. ``filtered``: reason -> groups that workers
    filtered out, since the start of the trial. ``in_use``: versions of this trainer that servers stage or serve, oldest
    first. The last one is the newest that the manager knows; no server will begin an older one but those of ``pins``
    (see RollBackReply). ``memory``: resident memory of GenerationServers and RolloutWorkers, by the names of the step
    log.
    """

    trained: int
    dropped: int
    lost: list[str] = []
    reissued: int = 0
    lost_tokens: dict[str, int] = {}
    in_use: list[int] = []
    verdict_failures: dict[str, int] = {}
    lost_lengths: dict[int, int] = {}
    filtered: dict[str, int] = {}
    memory: dict[str, int] = {}
    pins: dict[str, PublishedVersion] = {}


class EvaluateRequest(msgspec.Struct):
    """POST /evaluate: play the first ``n`` problems of ``split``, ``samples`` completions each, with one version.

    The same id again changes nothing. ``set``: name of the data set, by which RolloutWorkers choose sampling settings
    and verifier. ``max_failed``: completions that may fail in a complete evaluation. ``incarnation`` of the trainer:
    status 409 if it is older than the one that rolled back last. ``by_user``: the caller is no trainer, and has no
    incarnation.
    """

    eval_id: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    split: Identifier
    n: Annotated[int, msgspec.Meta(ge=1)]
    seed: Count = 0
    incarnation: AnyIncarnation = ""
    samples: Annotated[int, msgspec.Meta(ge=1, le=MOST_SAMPLES)] = 1
    set: ShortName = "eval"
    max_failed: Count = 0
    by_user: bool = False


class CancelRequest(msgspec.Struct):
    """POST /cancel_evaluation: end an evaluation that a user requested. One that has ended stays as it is."""

    eval_id: Identifier


class CancelReply(msgspec.Struct):
    """``cancelled`` False: it had ended before."""

    cancelled: bool


class EvaluateReply(msgspec.Struct):
    """``total``: problems of the evaluation, at most the size of its split."""

    total: int


class EvaluationReply(msgspec.Struct):
    """GET /evaluate/{eval_id}. It has ended when ``done + failed == total``, or if it was lost.

    done         completions with a verdict
    total        problems times samples
    failed       completions whose attempts all failed; a failure is not a wrong completion
    accuracy     mean over the problems of their share of right completions; None without right and wrong ones
    reward_mean  over all completions, None without one
    metrics      mean of each metric over the completions that have it
    ended        nothing more will come
    incomplete   why its numbers must not be shown, "" if they may; until the end always a text
    tallies      distinct (judged, right) completions of a problem, and the number of such problems; when it has ended
    accepted     (prompt index, sample, attempt) of the completions that count; when it has ended

    accuracy, reward_mean and metrics are empty while it is incomplete.
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
    ended: bool = False
    incomplete: str = ""
    problems: int = 0
    samples: int = 1
    set: str = "eval"
    restarts: int = 0
    tallies: list[tuple[int, int, int]] = []
    accepted: list[tuple[int, int, int]] = []


class VersionReply(msgspec.Struct):
    """GET /get_model_version; -1 before the first publication."""

    version: int


class DataPosition(msgspec.Struct, frozen=True):
    """GET /data_position, with the token: the position of training in the data, for a checkpoint.

    ``cursor`` is the position of the next new prompt in the order of ``prompts`` prompts that ``seed`` makes;
    ``pending`` are the prompts (indices) granted before it and not trained, in the order to issue them again.
    ``rates``: with a curriculum the success rate of each prompt in per mille, -1 if not measured. In the ``order`` of a
    script, prompts that were submitted and not granted are pending, too, and the cursor is behind them.
    """

    cursor: Count
    pending: list[Count]
    prompts: Annotated[int, msgspec.Meta(ge=1)]
    seed: int
    rates: list[Rate] = []
    order: Order = "shuffled"


# ---- refusals: the pure state raises them, and the routes turn each into its status and one line


class Refusal(Exception):
    """A call that the manager does not carry out. The text is one line for the caller."""

    status: ClassVar[int]


class BadCall(Refusal, ValueError):
    """The call contradicts itself, the configuration or the ledger: repeating it changes nothing."""

    status = 400


class NotFound(Refusal):
    """The manager does not know the thing that the call names."""

    status = 404


class NotRunning(Refusal):
    """The attempt has been superseded, or was never granted: its worker must cancel it."""

    status = 409


class OlderTrainer(Refusal):
    """A younger trainer has started since: the caller must end (``monotonic``)."""

    status = 409


class NoServer(Refusal):
    """No server may take the request now: the manager waits a moment before it refuses, and the caller tries again."""

    status = 503
