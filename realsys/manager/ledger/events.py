"""Records of the journal. The state of ledger and evaluations is a function of them, in order.

    Granted ──> Finished(accepted) ──> Claimed ──> Trained
       │  ^        ├─(failed, retry) ─┐
       │  └────────┴── Reissued <─────┘        the same ticket_id, attempt + 1
       └──> Finished(rejected | failed | filtered) / Dropped

    RolledBack: every running, finished or later trained ticket waits for its next attempt, in one record

Times are unix seconds of the manager's clock. Folders are recorded for people, not for decisions.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from realsys.manager.ledger.tickets import OpenTicket, ticket_name
from realsys.types import PublishedVersion

_I16, _I32, _I64 = (1 << 15) - 1, (1 << 31) - 1, (1 << 63) - 1  # largest numbers in the columns of a ledger
Positive = Annotated[int, msgspec.Meta(ge=1)]
Number = Annotated[int, msgspec.Meta(ge=0, le=_I32)]  # attempt or version
OrNone = Annotated[int, msgspec.Meta(ge=-1, le=_I32)]  # -1: none
Index = Annotated[int, msgspec.Meta(ge=0, le=_I64)]  # prompt, or position in the order of prompts
MOST_STALE = 255  # reissues of a ticket because its group was too old
MOST_PROBLEMS = 1 << 24  # per evaluation; the manager tracks each
#: filtered: the group has no signal, and its worker has discarded it (``train.ppo.filter``)
Outcome = Literal["accepted", "rejected", "failed", "filtered"]
Rate = Annotated[int, msgspec.Meta(ge=-1, le=1000)]  # success rate in per mille; -1: not measured
MOST_SAMPLES = 4096  # completions of a problem
Order = Literal["shuffled", "script", "none"]  # of the new prompts
MOST_SUBMITTED = 1 << 18  # prompts that are submitted and not granted; each is in every snapshot and checkpoint


class Resumed(msgspec.Struct, frozen=True, tag="resumed"):
    """First record of a trial that resumes the checkpoint of another one.

    ``groups`` count for admission like groups trained here. ``pending``: prompts that had been granted and were not
    trained at the checkpoint; they are granted before the new ones from ``cursor``.
    """

    checkpoint: str  # its folder
    step: Number
    groups: Index
    cursor: Index
    pending: list[Index]
    time: float
    rates: list[Rate] = []  # success rate of each prompt, for the curriculum; []: none


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """Settings that bind the decisions after it, so that the audit needs no other file. Repeated when one changes."""

    prompts: Positive
    seed: Annotated[int, msgspec.Meta(ge=0)]
    batch_groups: Positive  # B
    eta: Annotated[int, msgspec.Meta(ge=0)]
    stale_policy: str  # "mask", "drop": nothing older than eta is trained
    group_size: int
    time: float
    max_reissues: int = 0  # reissues that a ticket may have because its group was too old
    #: (lowest, highest success rate in per mille, floor) of data.curriculum; None: every prompt is taken
    curriculum: tuple[Rate, Rate, float] | None = None
    #: script: new prompts are those of ``Submitted`` records, in their order; shuffled: the permutation of ``seed``;
    #: none: a supervised run has no train tickets
    order: Order = "shuffled"

    def conflict(self, before: Opened) -> str | None:
        """Return why tickets granted with the settings ``before`` do not fit these; None if they do."""
        for name in ("prompts", "seed", "batch_groups", "order"):
            was, now = getattr(before, name), getattr(self, name)
            if was != now:
                return f"its tickets were granted with {name}={was}, and now it is {now}"
        return None


class Submitted(msgspec.Struct, frozen=True, tag="submitted"):
    """The training script submitted prompts: they follow the ``start`` prompts that it submitted before."""

    start: Index
    prompts: list[Index]
    time: float


class RolledBack(msgspec.Struct, frozen=True, tag="rolled_back"):
    """The trainer ``incarnation`` starts from ``version``; -1: from the beginning.

    Every ticket that is not in the weights of ``version`` or an older one, and was not dropped, is reissued.
    """

    version: OrNone
    step: int
    incarnation: str
    checkpoint: str  # its folder; "" when it starts from the beginning
    time: float


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """A train ticket went to a worker. ``position`` of the prompt in the order; -1 if the prompt is not new."""

    ticket_id: str
    attempt: Number
    prompt_index: Index
    position: Annotated[int, msgspec.Meta(ge=-1, le=_I64)]
    worker: str
    incarnation: str  # worker incarnation; "" before its first heartbeat
    version: OrNone
    time: float
    request: str = ""  # id of the allocation


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The worker reported the end of an attempt. ``retry``: the attempt failed and there will be another."""

    ticket_id: str
    attempt: Number
    outcome: Outcome
    reason: str
    retry: bool
    time: float
    version_min: OrNone = -1  # version of the oldest token
    version_max: OrNone = -1
    correct: Number = 0  # episodes that solved the task
    judged: Number = 0  # episodes that solved it or did not; the others have no right or wrong


class Reissued(msgspec.Struct, frozen=True, tag="reissued"):
    """The attempt is lost (lease lapsed, worker died, never arrived) or its group was too old (cause ``stale``); the
    ticket waits for its next one.
    """

    ticket_id: str
    attempt: Number  # the lost one
    cause: str
    time: float


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """The trainer dropped the group."""

    ticket_id: str
    reason: str
    time: float


class Claimed(msgspec.Struct, frozen=True, tag="claimed"):
    """The trainer is about to train these into ``version``: attempts that still run do not end the tickets any more."""

    version: Number
    tickets: list[str]
    time: float
    incarnation: str = ""  # trainer incarnation


class Trained(msgspec.Struct, frozen=True, tag="trained"):
    """These tickets are in the weights of ``version``. ``oldest``: for each the version of its oldest token."""

    version: Number
    step: int
    tickets: list[str]
    time: float
    oldest: list[OrNone] = []
    incarnation: str = ""  # trainer incarnation


class EvalStarted(msgspec.Struct, frozen=True, tag="eval_started"):
    """An evaluation of ``total`` problems, each with ``samples`` completions, all of one version: ``version`` or newer.

    ``max_failed``: completions that may fail; with more the evaluation is incomplete. ``by_user``: requested by a
    user and not by the trainer.
    """

    eval_id: str
    split: str
    total: Annotated[int, msgspec.Meta(ge=0, le=MOST_PROBLEMS)]
    seed: int
    version: int
    time: float
    samples: Annotated[int, msgspec.Meta(ge=1, le=MOST_SAMPLES)] = 1
    set: str = "eval"
    max_failed: int = 0
    by_user: bool = False


class EvalAnswered(msgspec.Struct, frozen=True, tag="eval_answered"):
    """One completion of an evaluation has ended. ``failed``: every attempt failed, so there is no completion."""

    eval_id: str
    prompt_index: int
    failed: bool
    correct: bool | None  # None: the task has no right or wrong
    length: int
    version_min: int
    version_max: int
    metrics: dict[str, float] = {}
    reward: float = 0.0
    sample: int = 0  # number of the completion of its problem
    attempt: Number = 0


class EvalLost(msgspec.Struct, frozen=True, tag="eval_lost"):
    """No server serves the version of an unfinished evaluation any more, or it may delay updates no longer.

    ``again``: its completions are discarded, and it begins anew with another version. Otherwise it has ended,
    incomplete.
    """

    eval_id: str
    reason: str
    again: bool
    time: float


class EvalsResumed(msgspec.Struct, frozen=True, tag="evals_resumed"):
    """A manager has started with unfinished evaluations. Grants of theirs are not recorded, so it counts attempts anew,
    from a number that no attempt before it can have.
    """

    time: float


class EvalHeld(msgspec.Struct, frozen=True, tag="eval_held"):
    """Servers keep the version ``held`` for an unfinished evaluation, from now on until it has ended."""

    eval_id: str
    held: PublishedVersion
    time: float


class Pinned(msgspec.Struct, frozen=True, tag="pinned"):
    """The trainer has pinned a version: servers keep ``held`` under this name. None: not any more."""

    name: str
    held: PublishedVersion | None
    time: float


class EvaluationState(msgspec.Struct):
    """Progress of an evaluation, as a snapshot keeps it: without the running problems, as after any restart.

    A unit is one completion: prompt index * samples + number of the completion. ``metrics``: name -> (sum,
    completions). ``unjudged``: completions without right or wrong. ``tallies``: prompt index -> (judged, right)
    completions; journals of older versions have none. ``lost``: why it has ended incomplete. ``held``: see EvalHeld.
    """

    started: EvalStarted
    done: list[int] = []  # units
    failed: int = 0
    correct: int = 0
    length: int = 0
    version_min: int = -1
    version_max: int = -1
    first_attempt: int = 0
    metrics: dict[str, tuple[float, int]] = {}
    unjudged: int = 0
    reward: float = 0.0  # sum over the completions
    tallies: dict[int, tuple[int, int]] = {}
    accepted: dict[int, int] = {}  # unit -> attempt whose completion counts
    restarts: int = 0
    lost: str = ""
    held: PublishedVersion | None = None
    held_since: float | None = None


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """First record of a compacted journal: the state that the ``records`` before it led to.

    ``outcome``, ``attempt``, ``prompt`` and ``lag`` have one entry per ticket, by number. outcome: -1 open, k >= 0
    trained at version k, -2 - i dropped for ``reasons[i]``. lag: versions that its oldest token was behind when it was
    trained, -1 if not trained or unknown. stale: reissues because a group was too old; empty: none. ``prompts``:
    pending at the resumed checkpoint and not granted again yet, in order. ``submitted``: prompts from ``cursor`` on.
    """

    records: int
    opened: Opened | None
    rolled_back: RolledBack | None
    reissued: int  # tickets that this roll-back reissued
    starts: int
    inherited: int
    base: int  # oldest version to roll back to: -1, or the step of the resumed checkpoint
    newest: int  # newest version that a batch was trained for
    cursor: int
    outcome: list[int]
    attempt: list[int]
    prompt: list[int]
    lag: list[int]
    reasons: list[str]
    open: list[OpenTicket]
    prompts: list[int]
    reissued_by_cause: dict[str, int]
    evaluations: list[EvaluationState]
    forgotten: dict[str, int]  # evaluation that a roll-back discarded -> its blocks of attempt numbers
    time: float
    pins: dict[str, PublishedVersion] = {}
    stale: list[int] = []
    rates: list[Rate] = []  # success rate of each prompt; []: none is measured
    submitted: list[Index] = []
    chain: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0  # checksum of the last record before

    def problem(self) -> str | None:
        """Return why no ledger can have been in this state, None if one can."""
        columns = (self.outcome, self.attempt, self.prompt, self.lag, self.stale or self.lag)
        open_ = [ticket_name(number) for number, code in enumerate(self.outcome) if code == -1]
        if len({len(column) for column in columns}) > 1 or open_ != sorted(ticket.ticket_id for ticket in self.open):
            return f"a snapshot of {self.records} records has columns or open tickets that do not match"
        bounds = (
            (self.outcome, -1 - len(self.reasons), _I32),
            (self.attempt, 0, _I32),
            (self.prompt, 0, _I64),
            (self.lag, -1, _I16),
            (self.stale, 0, MOST_STALE),
        )
        if any(column and (min(column) < low or max(column) > high) for column, low, high in bounds):
            return f"a snapshot of {self.records} records with numbers out of bounds"
        return None


TicketEvent = (
    Snapshot | Opened | Resumed | Submitted | RolledBack | Granted | Finished | Reissued | Dropped | Claimed | Trained
)
EvalEvent = EvalStarted | EvalAnswered | EvalHeld | EvalLost | EvalsResumed | Pinned
Event = TicketEvent | EvalEvent
