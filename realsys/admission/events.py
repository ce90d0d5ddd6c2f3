"""What the journal records. The state of ledger and evaluations is a function of these, in order.

    Granted ──> Finished(accepted) ──> Trained
       │  ^        ├─(failed, retry) ─┐
       │  └────────┴── Reissued <─────┘        the same ticket_id, attempt + 1
       └──> Finished(rejected | failed) / Dropped

Times are unix seconds of the manager's clock.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Outcome = Literal["accepted", "rejected", "failed"]


class Resumed(msgspec.Struct, frozen=True, tag="resumed"):
    """First record of a trial that continues from a checkpoint of another one.

    ``groups`` count for admission like groups trained here. ``pending``: prompts that had been granted and were not
    trained at the checkpoint; they come before the new ones from ``cursor`` on.
    """

    checkpoint: str  # for people: its folder
    step: int
    groups: int
    cursor: int
    pending: list[int]
    time: float


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """What the decisions after it were bound by: the audit needs no other file. Again whenever any of it changes."""

    prompts: int
    seed: int
    batch_groups: int  # B
    eta: int
    stale_policy: str  # "drop": nothing older than eta is trained
    group_size: int
    time: float


class RolledBack(msgspec.Struct, frozen=True, tag="rolled_back"):
    """The training side, now ``incarnation``, goes on from what ``version`` was; -1: from the start.

    Every ticket that is not in the weights of ``version`` or an older one, and has not been dropped, is re-issued.
    """

    version: int
    step: int
    incarnation: str
    checkpoint: str  # for people: its folder; "" when it starts from the beginning
    time: float


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """A train ticket went to a worker. ``position`` of the prompt in the order; -1 if it is not a new one."""

    ticket_id: str
    attempt: int
    prompt_index: int
    position: int
    worker: str
    incarnation: str  # of the worker; "" when it had no heartbeat yet
    version: int
    time: float
    request: str = ""  # id of the allocation it answered


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The worker reported the end of an attempt. ``retry``: the attempt failed and there will be another."""

    ticket_id: str
    attempt: int
    outcome: Outcome
    reason: str
    retry: bool
    time: float
    version_min: int = -1  # of the answers' tokens; -1: there are none
    version_max: int = -1


class Reissued(msgspec.Struct, frozen=True, tag="reissued"):
    """The attempt is lost (lease lapsed, worker died, training rolled back); the ticket waits for its next one."""

    ticket_id: str
    attempt: int  # the one that was lost
    cause: str
    time: float


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """The trainer gave the group back. ``requeue``: its prompt gets a fresh ticket (it was too stale, not bad)."""

    ticket_id: str
    reason: str
    requeue: bool
    time: float


class Trained(msgspec.Struct, frozen=True, tag="trained"):
    """These tickets are in the weights of ``version``. ``oldest``: of each, the version of its oldest token."""

    version: int
    step: int
    tickets: list[str]
    time: float
    oldest: list[int] = []
    incarnation: str = ""  # of the training side


class EvalStarted(msgspec.Struct, frozen=True, tag="eval_started"):
    """An evaluation of ``total`` problems; only servers at ``version`` or newer may answer."""

    eval_id: str
    split: str
    total: int
    seed: int
    version: int
    time: float


class EvalAnswered(msgspec.Struct, frozen=True, tag="eval_answered"):
    """One problem of an evaluation is done. ``failed``: every attempt failed, so there is no answer."""

    eval_id: str
    prompt_index: int
    failed: bool
    correct: bool
    length: int
    version_min: int
    version_max: int


TicketEvent = Resumed | Granted | Finished | Reissued | Dropped | Trained
EvalEvent = EvalStarted | EvalAnswered
Event = Resumed | Granted | Finished | Reissued | Dropped | Trained | EvalStarted | EvalAnswered
