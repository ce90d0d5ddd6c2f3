"""The groups that arrive from rollout, until they form a batch.

    notices ──on_samples──> buffer ──next_batch──> claimed at the manager ──> groups of one step
         another training side's  │ copies, success rate outside the filter (on arrival), too stale (in next_batch)
                  └──> freed      └──> reported to the manager, which reissues or replaces them; freed

Consumes the notices of the DP heads. ``next_batch`` waits for the groups of a batch; each arrival
unblocks it. ``report_drops`` runs while the steps run, so a group that is dropped on arrival frees
its quota before the step ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from realsys.buffer.sequence_buffer import Batch, Keep, SequenceBuffer
from realsys.config.schema import Config
from realsys.errors import StuckError, WaitTimeout
from realsys.manager.messages import ClaimRequest, TrainedRequest
from realsys.master.calls.model_workers import ModelWorkers
from realsys.master.evaluation import Repair
from realsys.master.stuck import StuckCheck, check_filter
from realsys.rollout.manager_client import ManagerClient
from realsys.types import SampleMeta

log = logging.getLogger(__name__)

_STATUS_INTERVAL_S = 5.0  # between two reads of the manager's status while no group arrives


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The groups of a step.

    ``dropped_stale``, ``dropped_filtered``: groups dropped since the previous batch. ``refused``:
    samples since then that were granted under another training side.
    """

    groups: list[list[SampleMeta]]
    dropped_stale: int
    dropped_filtered: int
    refused: int

    @property
    def tickets(self) -> list[str]:
        """Return the ticket ids of the groups, sorted."""
        return sorted({sample.ticket_id for sample in self.samples})

    @property
    def oldest(self) -> list[int]:
        """Return for each of ``tickets`` the version of its oldest token."""
        oldest = {group[0].ticket_id: min(sample.version_min for sample in group) for group in self.groups}
        return [oldest[ticket] for ticket in self.tickets]

    @property
    def samples(self) -> list[SampleMeta]:
        return [sample for group in self.groups for sample in group]


class Intake:
    """The buffer between the stream and the steps.

    ``keep`` returns True if a group is worth training on. ``trainer_incarnation``: incarnation of
    this training side. Groups that were granted under another one are reissued, so they are neither
    trained nor reported as dropped.
    """

    def __init__(
        self,
        config: Config,
        *,
        trainer_incarnation: str,
        keep: Keep,
        workers: ModelWorkers,
        manager: ManagerClient,
        repair: Repair,
    ) -> None:
        """``repair``: called with the manager's status while no group arrives."""
        self.trainer_incarnation = trainer_incarnation
        self._repair = repair
        self._config = config
        self._workers = workers
        self._manager = manager
        self._buffer = SequenceBuffer(keep)
        self._version = 0
        self._filtered = 0  # groups since the last batch
        self._refused = 0  # samples since the last batch
        self._dropped: list[tuple[str, str]] = []  # (ticket, reason), not yet reported
        # ticket -> attempt of the dropped groups, until they are reported
        self._leaving: dict[str, int] = {}
        self._to_free: list[SampleMeta] = []
        self._arrived = asyncio.Event()
        self._work_left = asyncio.Event()  # wakes report_drops

    def on_samples(self, samples: Sequence[SampleMeta]) -> None:
        """Take the samples of a notice `samples_arrived`.

        Copies of a group are refused and freed on their worker.
        """
        samples = self._select_current(samples)
        added = self._buffer.add(samples)
        if added.rejected:
            log.warning("refused %d samples that arrived twice, of %s", added.rejected, samples[0].ticket_id)
        self._filtered += len(added.dropped)
        self._dropped.extend(added.dropped)
        dropped = {ticket_id for ticket_id, _ in added.dropped}
        self._leaving |= {sample.ticket_id: sample.attempt for sample in added.clear if sample.ticket_id in dropped}
        self._to_free.extend(added.clear)
        if self._to_free:
            self._work_left.set()
        self._arrived.set()

    def _select_current(self, samples: Sequence[SampleMeta]) -> list[SampleMeta]:
        """Return the samples granted under this training side, and count the others; the DP heads
        usually refuse those.
        """
        current = [sample for sample in samples if sample.trainer_incarnation == self.trainer_incarnation]
        foreign = [sample for sample in samples if sample.trainer_incarnation != self.trainer_incarnation]
        if foreign:
            self._refused += len(foreign)
            self._to_free.extend(foreign)
            first = foreign[0]
            log.warning(
                "refused %d samples of trainer %r, of %s", len(foreign), first.trainer_incarnation, first.ticket_id
            )
        return current

    def held(self) -> list[tuple[str, int]]:
        """Return (ticket, attempt) of the groups buffered here; the manager need not reissue them.

        Excludes the batch in training, whose tickets are reported as trained.
        """
        return sorted({**self._leaving, **self._buffer.held()}.items())

    async def report_drops(self) -> None:
        """Report and free the groups that were dropped on arrival, until cancelled."""
        while True:
            await self._work_left.wait()
            self._work_left.clear()
            # Taken out before the first await: on_samples may append while a report is on its way.
            dropped, self._dropped = self._dropped, []
            unused, self._to_free = self._to_free, []
            await self._drop(dropped)
            await self._free(unused)

    async def next_batch(self, version: int) -> TrainBatch:
        """Wait for the groups of a batch within the staleness bound at ``version``; drop the groups
        beyond it.

        Raises StuckError when no further batch can come, and WaitTimeout with the manager's state
        when no group arrives for ``cluster.request_timeout_s``.
        """
        asynchronous, train = self._config.asynchronous, self._config.train
        self._version = version
        dropped_stale = 0
        while True:
            # Cleared before the buffer is read: a group that arrives in between must not go
            # unnoticed.
            self._arrived.clear()
            batch = self._buffer.take(
                train.batch_groups, version, asynchronous.max_head_offpolicyness, asynchronous.stale_policy
            )
            dropped_stale += len(batch.dropped)
            await self._drop(batch.dropped)
            await self._free(batch.clear)
            if batch.groups:
                if not await self._claim(batch):
                    continue
                return self._finish_batch(batch, dropped_stale)
            if reason := check_filter(self._buffer.filtered_in_a_row, train.batch_groups, train.ppo.filter):
                raise StuckError(f"master_worker: step {version + 1} can never get its batch: {reason}")
            await self._next_group(version + 1)

    async def _claim(self, batch: Batch) -> bool:
        """Return True if the ledger lets the whole batch be trained (`claim-before-train`).

        Groups whose tickets have ended leave the buffer: the manager counted their
        attempts as failed before their samples arrived.
        """
        tickets = sorted(group[0].ticket_id for group in batch.groups)
        reply = await self._manager.claim(ClaimRequest(self._version + 1, tickets, self.trainer_incarnation))
        if ended := reply.gone:
            log.warning("%d groups arrived after their tickets had ended: %s", len(ended), ", ".join(ended[:20]))
            await self._free(self._buffer.release(ended))
        return not ended

    def _finish_batch(self, batch: Batch, dropped_stale: int) -> TrainBatch:
        train_batch = TrainBatch(batch.groups, dropped_stale, self._filtered, self._refused)
        self._filtered = 0
        self._refused = 0
        return train_batch

    async def _next_group(self, step: int) -> None:
        """Wait until samples arrive.

        Every few seconds check that some still can. Raises StuckError, WaitTimeout.
        """
        batch_groups = self._config.train.batch_groups
        timeout = self._config.cluster.request_timeout_s
        check = StuckCheck(batch_groups)
        deadline = time.monotonic() + timeout
        while not await self._arrival(min(_STATUS_INTERVAL_S, timeout)):
            # The manager counts a group that was lost in transit as finished, so it grants no
            # other. Only this report shows the loss.
            await self._report_held()
            ready = self._buffer.ready_groups
            status = await self._manager.status()
            await self._repair(status)
            if reason := check.check(status, ready):
                raise StuckError(f"master_worker: step {step} can never get its batch: {reason}; see the workers' logs")
            if time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"master_worker: step {step} waited {timeout:g} s for a group and has {ready} of {batch_groups}: "
                    f"see the rollout workers' logs; status of the manager: {await self._explain()}"
                )

    async def _arrival(self, timeout_s: float) -> bool:
        """Return True if samples arrive within ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            return False
        return True

    async def _explain(self) -> str:
        status = await self._manager.status()
        return f"admission {status.get('admission')}, ledger {status.get('ledger')}"

    async def _report_held(self) -> None:
        request = TrainedRequest(self._version, self._version, incarnation=self.trainer_incarnation, held=self.held())
        if lost := (await self._manager.trained(request)).lost:
            log.warning("%d groups never arrived and are reissued: %s", len(lost), ", ".join(lost[:20]))

    async def _drop(self, dropped: list[tuple[str, str]]) -> None:
        """Report to the manager the groups that will not be trained."""
        if dropped:
            request = TrainedRequest(
                self._version, self._version, dropped=dropped, incarnation=self.trainer_incarnation
            )
            await self._manager.trained(request)
            for ticket_id, _ in dropped:
                self._leaving.pop(ticket_id, None)

    async def _free(self, samples: Sequence[SampleMeta]) -> None:
        """Free samples that will not be trained, each on the worker that received it."""
        by_owner: dict[int, list[str]] = {}
        for sample in samples:
            by_owner.setdefault(sample.owner, []).append(sample.sample_id)
        for owner, ids in sorted(by_owner.items()):
            await self._workers.clear([owner], ids)
