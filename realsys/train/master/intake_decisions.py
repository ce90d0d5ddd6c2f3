"""Decisions of the intake: what becomes of each group that arrives, until it is in a batch. Pure: no I/O, no clock.

    samples ──add──> buffer ──propose──> batch ──conclude──> TrainBatch
       │ another trainer's, copies,        │ all tokens        │ ticket has ended
       │ too old                           │ masked                └──> freed; the rest is ready again
       └──────────── depart <──────────────┘
                       └──> the shell reports the drops and frees the samples ──reported──> forgotten

``add`` and ``depart`` may be called at any moment. ``propose`` and ``conclude`` alternate: the shell claims the
proposed groups at the manager in between (``claim-before-train``), and calls ``begin_wait`` and ``check_wait`` while
nothing can be proposed. ``now`` is in seconds of any clock that does not go back.

``asynchronous.stale_policy`` says what becomes of tokens that are more than eta versions older than the version that
trains on them:

train   they are trained; nothing is thrown away
mask    they stay in the context and leave the loss, in ``propose``: only then is the version known
drop    a group that is too old when it is complete, or will be by its turn, is discarded in ``add`` and its ticket
        issued again, ``max_reissues`` times; tokens that are too old later are masked
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realsys.algorithm.sequence_buffer import Batch, SequenceBuffer, StalePolicy
from realsys.algorithm.token_losses import COPY, MASKED, NO_LOSSES, STALE, TOO_OLD, StepLosses, TokenLosses
from realsys.config.schema import Config
from realsys.errors import PromptsUsedUp, StuckError, WaitTimeout
from realsys.manager.messages import MAX_REISSUES
from realsys.model_calls import KeepDroppedRequest
from realsys.types import SampleMeta

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IntakeSettings:
    """The part of the configuration that the intake decides by.

    max_refills  batches' worth of groups that workers may filter out in a row
    timeout_s    longest wait for a group
    """

    batch_groups: int
    eta: int
    stale_policy: StalePolicy
    max_reissues: int
    max_refills: int
    timeout_s: float

    @classmethod
    def of(cls, config: Config) -> IntakeSettings:
        return cls(
            batch_groups=config.train.batch_groups,
            eta=config.asynchronous.max_staleness,
            stale_policy=config.asynchronous.stale_policy,
            max_reissues=MAX_REISSUES,
            max_refills=config.train.ppo.filter.max_refills,
            timeout_s=config.cluster.request_timeout_s,
        )


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The groups of a step, without the rows and tokens that are too old to be trained.

    dropped_stale     groups since the batch before whose tokens were all too old, or that were issued again
    refused           samples since then that were granted under another trainer
    masked            rows of which some tokens are too old: the workers must take these out of the loss
    oldest_trained    version of the oldest token that may be trained; None: any
    losses            sampled tokens that were not trained
    rolled_out        False: rows of ``data.demos``, which have no tickets
    """

    groups: list[list[SampleMeta]]
    dropped_stale: int = 0
    refused: int = 0
    masked: list[SampleMeta] = field(default_factory=list)
    oldest_trained: int | None = None
    losses: StepLosses = NO_LOSSES
    rolled_out: bool = True

    @property
    def tickets(self) -> list[str]:
        """Return the ticket ids of the groups, sorted."""
        return sorted({sample.ticket_id for sample in self.samples}) if self.rolled_out else []

    @property
    def oldest(self) -> list[int]:
        """Return for each of ``tickets`` the version of its oldest token."""
        oldest = {group[0].ticket_id: min(sample.version_min for sample in group) for group in self.groups}
        return [oldest[ticket] for ticket in self.tickets]

    @property
    def samples(self) -> list[SampleMeta]:
        return [sample for group in self.groups for sample in group]


@dataclass(slots=True)
class Departures:
    """Effects for the shell.

    dropped  (ticket, reason) of groups that were dropped, to report
    stale    (ticket, attempt) of groups that were too old, to report: they are issued again
    free     samples to free on their workers
    kept     worker -> the newest group that was too old and that it holds: it is written to disk for people. Only one,
             because a worker writes at most one per second
    """

    dropped: list[tuple[str, str]] = field(default_factory=list)
    stale: list[tuple[str, int]] = field(default_factory=list)
    free: list[SampleMeta] = field(default_factory=list)
    kept: dict[int, KeepDroppedRequest] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.dropped or self.stale or self.free)


class IntakeState:
    """The groups between the stream and the steps, and the decisions about them.

    ``trainer_incarnation``: incarnation of this trainer. Groups that were granted under another
    one are reissued, so they are neither trained nor reported as dropped. ``version`` is the one that
    the next batch is trained on top of.
    """

    def __init__(self, settings: IntakeSettings, trainer_incarnation: str) -> None:
        self.trainer_incarnation = trainer_incarnation
        self.version = 0
        self.buffer = SequenceBuffer(self._too_old)
        self.losses = TokenLosses()
        self.settings = settings
        self.departures = Departures()  # ``depart`` hands them over
        self._proposed: Batch | None = None
        self._stale = 0  # groups dropped since the last batch
        self._refused = 0  # samples since the last batch
        self._leaving: dict[str, int] = {}  # ticket -> attempt of the dropped groups, until they are reported
        self._check = StuckCheck(settings.batch_groups, settings.max_refills)
        self._deadline = 0.0

    # -- arrivals and departures -------------------------------------------------------------------

    def add(self, samples: Sequence[SampleMeta]) -> None:
        """Take samples that have arrived. Copies of a group, and groups of another trainer, are refused."""
        # the DP heads usually refuse samples of another trainer
        foreign = [sample for sample in samples if sample.trainer_incarnation != self.trainer_incarnation]
        if foreign:
            self._refused += len(foreign)
            self.departures.free.extend(foreign)
            self.losses.lose(COPY, foreign)
            first = foreign[0]
            log.warning(
                "refused %d samples of trainer %r, of %s", len(foreign), first.trainer_incarnation, first.ticket_id
            )
        samples = [sample for sample in samples if sample.trainer_incarnation == self.trainer_incarnation]
        added = self.buffer.add(samples)
        if added.rejected:
            log.warning("refused %d samples that arrived twice, of %s", added.rejected, samples[0].ticket_id)
        self._stale += len(added.stale)
        self._lose(added.lost)
        self.departures.stale.extend(added.stale)
        self._leave([*added.dropped, *added.stale], added.clear)
        self.departures.dropped.extend(added.dropped)

    def _too_old(self, group: Sequence[SampleMeta]) -> str:
        """Return why a complete group leaves when it arrives, or "" if it stays.

        STALE: its ticket is issued again. MASKED: no token of it can be trained. It is trained after the groups of
        older tickets, on top of a later version if these fill a batch.
        """
        settings = self.settings
        if settings.stale_policy == "train":
            return ""
        turn = self.version + self.buffer.ready_before(group[0].ticket_id) // settings.batch_groups
        oldest = turn - settings.eta
        if settings.stale_policy == "drop" and group[0].reissues < settings.max_reissues:
            return STALE if min(sample.version_min for sample in group) < oldest else ""
        return MASKED if max(sample.version_max for sample in group) < oldest else ""

    def held(self) -> list[tuple[str, int]]:
        """Return (ticket, attempt) of the groups held here, which the manager need not reissue.

        Excludes the batch in training, whose tickets are reported as trained.
        """
        return sorted({**self._leaving, **self.buffer.held()}.items())

    def depart(self) -> Departures:
        """Hand over what must be reported and freed. Call ``reported`` when the manager knows of the drops."""
        departures, self.departures = self.departures, Departures()
        return departures

    def reported(self, departures: Departures) -> None:
        """The manager knows these drops: its ledger, not this side, answers for their tickets."""
        for ticket_id, _ in [*departures.dropped, *departures.stale]:
            self._leaving.pop(ticket_id, None)

    def _leave(self, ended: Sequence[tuple[str, object]], clear: Sequence[SampleMeta]) -> None:
        tickets = {ticket_id for ticket_id, _ in ended}
        self._leaving |= {sample.ticket_id: sample.attempt for sample in clear if sample.ticket_id in tickets}
        self.departures.free.extend(clear)

    def _lose(self, lost: Sequence[tuple[str, Sequence[SampleMeta]]]) -> None:
        for reason, samples in lost:
            self.losses.lose(reason, samples)
            if reason in TOO_OLD:
                owner = samples[0].owner
                held = [sample for sample in samples if sample.owner == owner]
                self.departures.kept[owner] = KeepDroppedRequest(reason, self.version, held)

    def observe_lost(self, tokens: Mapping[str, int], lengths: Counter[int]) -> None:
        """Count tokens that workers did not push, by reason, and the lengths of the completions that did not fail."""
        for reason, count in tokens.items():
            self.losses.lose_tokens(reason, count)
        self.losses.lose_lengths(lengths)

    # -- batches -----------------------------------------------------------------------------------

    @property
    def has_batch(self) -> bool:
        """True if the groups of another batch have arrived."""
        return self.buffer.ready_groups >= self.settings.batch_groups

    def propose(self, version: int, groups: int = 0) -> list[str]:
        """Choose ``groups`` groups (0: those of a batch) to train on top of ``version``.

        Returns their tickets, sorted, or [] if there are too few.

        The shell claims the tickets, and calls ``conclude``.
        """
        settings = self.settings
        self.version = version
        batch = self.buffer.take(groups or settings.batch_groups, self._oldest_trained())
        self._stale += len(batch.dropped)
        self._lose(batch.lost)
        self.departures.dropped.extend(batch.dropped)
        self._leave(batch.dropped, batch.clear)
        if batch.groups:
            self._proposed = batch
        return sorted(group[0].ticket_id for group in batch.groups)

    def conclude(self, ended: Sequence[str]) -> TrainBatch | None:
        """Return the proposed groups as the batch of a step, None if some of their tickets have ``ended``.

        Groups whose tickets have ended leave the buffer: the manager counted their attempts as failed
        before their samples arrived. The others are ready again.
        """
        batch = self._proposed
        assert batch is not None, "conclude() without propose()"
        self._proposed = None
        if ended:
            log.warning("%d groups arrived after their tickets had ended: %s", len(ended), ", ".join(ended[:20]))
            released = self.buffer.release(ended)
            self._lose(released.lost)
            self.departures.free.extend(released.clear)
            return None
        self.departures.free.extend(batch.unused)
        self.losses.train(batch.sampled, (row for group in batch.groups for row in group))
        train_batch = TrainBatch(
            groups=batch.groups,
            dropped_stale=self._stale,
            refused=self._refused,
            masked=batch.masked,
            oldest_trained=self._oldest_trained(),
            losses=self.losses.close_step(),
        )
        self._stale = 0
        self._refused = 0
        if len(batch.groups) >= self.settings.batch_groups:
            self.version += 1  # a smaller batch of a script is not all that this version trains
        return train_batch

    def _oldest_trained(self) -> int | None:
        """Return the version of the oldest token that the next batch may train; None: any."""
        return None if self.settings.stale_policy == "train" else self.version - self.settings.eta

    # -- waiting -----------------------------------------------------------------------------------

    def begin_wait(self, now: float) -> None:
        """Start the wait for the next group."""
        self._check = StuckCheck(self.settings.batch_groups, self.settings.max_refills)
        self._deadline = now + self.settings.timeout_s

    def check_wait(self, status: Mapping[str, Any], now: float) -> None:
        """Check from the manager's status that a group can still come.

        Raises PromptsUsedUp or StuckError if none can, WaitTimeout if none came for ``timeout_s``.
        """
        step, ready, batch_groups = self.version + 1, self.buffer.ready_groups, self.settings.batch_groups
        if reason := self._check.check(status, ready):
            if self._check.is_end:
                raise PromptsUsedUp(reason)
            raise StuckError(f"master_worker: step {step} can never get its batch: {reason}; see the workers' logs")
        if warning := self._check.warning():
            log.warning("step %d waits for its batch: %s", step, warning)
        if now >= self._deadline:
            raise WaitTimeout(
                f"master_worker: step {step} waited {self.settings.timeout_s:g} s for a group and has {ready} of "
                f"{batch_groups}: see the rollout workers' logs; status of the manager: admission "
                f"{status.get('admission')}, ledger {status.get('ledger')}"
            )


# ---- batches that can never fill
#
# A wait for groups can last for ever in three ways. All prompts have ended and the batch is short of groups (a small
# data set, most of it failed). Each group fails and is replaced by a fresh one that fails too. Or workers filter out
# each group (`train.ppo.filter`). The manager's status tells.


FEWEST_FAILURES = 32  # dropped groups without an arrival in between, after which a run is stuck
#: Filtered groups without a kept one in between, after which a run is stuck. If only 2 % of the
#: prompts were worth training on, the next 256 would all be filtered out with probability 0.98^256
#: = 0.6 %.
FEWEST_FILTERED = 256


class StuckCheck:
    """Check of one wait for the next group.

    A suspicion must hold for two statuses in a row to be reported.
    """

    def __init__(self, batch_groups: int, max_refills: int) -> None:
        """``max_refills``: batches' worth of groups that may be filtered out during one wait."""
        self._batch_groups = batch_groups
        self._bound = max(FEWEST_FAILURES, 2 * batch_groups)
        self._most_filtered = max(FEWEST_FILTERED, max_refills * batch_groups)
        self._begin: tuple[int, int] | None = None  # groups dropped otherwise, and filtered out, when the wait began
        self._filtered = ""  # the warning, from half of ``_most_filtered`` on
        self._warned = False
        self._suspected = False
        self.is_end = False  # the reason is that the prompts are used up after training: the run ends well

    def check(self, status: Mapping[str, Any], ready: int) -> str | None:
        """Return why no batch can come, or None. ``ready``: groups that wait in the buffer."""
        ledger = status["ledger"]
        drops = ledger["dropped_by_reason"]
        reasons = ", ".join(f"{n} x {reason}" for reason, n in drops.items()) or "none"
        filtered = sum(n for reason, n in drops.items() if reason.startswith("filtered "))
        failed = ledger["dropped"] - filtered  # a group that was filtered out has not failed
        share = filtered / max(1, ledger["trained"] + ledger["dropped"])
        self._begin = self._begin or (failed, filtered)
        failed, filtered = failed - self._begin[0], filtered - self._begin[1]
        seen = f"the last {filtered} groups were all filtered out, {share:.0%} of all groups so far ({reasons})"
        if failed >= self._bound:
            last = f"; the last one: {ledger['last_failure']}" if ledger.get("last_failure") else ""
            return f"none arrived while {failed} groups were dropped (dropped so far: {reasons}{last})"
        reason = status["admission"]["reason"]
        used_up = (
            reason in ("exhausted", "nothing_submitted")
            and not ledger["running"]
            and not ledger["waiting"]
            and ledger["finished"] <= ready < self._batch_groups
        )
        if used_up and self._suspected and reason == "nothing_submitted":
            return f"the script has submitted no more than {ledger['granted']} rows, and all have ended: submit others"
        if used_up and self._suspected:
            self.is_end = ledger["trained"] > 0
            ended = (
                f"all {ledger['granted']} groups have ended: {ledger['trained']} trained, {ledger['dropped']} dropped "
                f"({reasons}), {ready} left, fewer than the {self._batch_groups} of a batch (train.batch_groups)"
            )
            return ended if self.is_end else f"{ended}: decrease it, or add prompts"
        # A group that is in transit looks the same for a moment, so one status alone proves
        # nothing.
        self._suspected = used_up
        if filtered >= self._most_filtered and not used_up:
            return f"{seen}: widen train.ppo.filter, change the prompts, or increase train.ppo.filter.max_refills"
        if 2 * filtered >= self._most_filtered:
            self._filtered = f"{seen}; it is given up after {self._most_filtered} in a row"
        return None

    def warning(self) -> str:
        """Return, once, that half of the groups that may be filtered out in a row have been; else ""."""
        if self._warned or not self._filtered:
            return ""
        self._warned = True
        return self._filtered
