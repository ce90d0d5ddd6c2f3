"""What arrives from rollout, until it is a batch.

    notices ──on_samples──> buffer ──next_batch──> claimed at the manager ──> groups of one step
         another training side's  │ copies, success rate out of bounds (at once), too stale (at the next batch)
                  └──> freed      └──> told to the manager, which gives the quota to another prompt; freed

Consumes the notices of the DP heads; ``next_batch`` waits for a batch's worth of groups and is unblocked by the arrival
of one; ``give_back`` runs beside the steps, so that what is sorted out on arrival does not hold quota while one trains.
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
from realsys.master.evaluation import Mend
from realsys.master.stuck import StuckCheck, filtered_out
from realsys.rollout.manager_client import ManagerClient
from realsys.types import SampleMeta

log = logging.getLogger(__name__)

_LOOK_S = 5.0  # between two looks at the manager's status while no group arrives


@dataclass(frozen=True, slots=True)
class Taken:
    """The groups of a step; since the batch before: groups dropped, by reason, and samples ``refused``, which were
    granted under another training side.
    """

    groups: list[list[SampleMeta]]
    dropped_stale: int
    dropped_filtered: int
    refused: int

    @property
    def tickets(self) -> list[str]:
        """In order."""
        return sorted({sample.ticket_id for sample in self.samples})

    @property
    def oldest(self) -> list[int]:
        """For each of ``tickets``, the version of its oldest token."""
        oldest = {group[0].ticket_id: min(sample.version_min for sample in group) for group in self.groups}
        return [oldest[ticket] for ticket in self.tickets]

    @property
    def samples(self) -> list[SampleMeta]:
        return [sample for group in self.groups for sample in group]


class Intake:
    """The buffer between the stream and the steps.

    ``keep``: whether a group is worth training on. ``training``: incarnation of this training side; what was granted
    under another one has been re-issued, so that it is neither trained nor given back.
    """

    def __init__(
        self,
        config: Config,
        *,
        trainer_incarnation: str,
        keep: Keep,
        workers: ModelWorkers,
        manager: ManagerClient,
        mend: Mend,
    ) -> None:
        """``mend``: called with the manager's status while no group arrives."""
        self._mend = mend
        self._config, self.trainer_incarnation, self._workers, self._manager = (
            config,
            trainer_incarnation,
            workers,
            manager,
        )
        self._buffer = SequenceBuffer(keep)
        self._version = 0
        self._filtered = self._refused = 0  # groups, and samples, since the last batch
        self._dropped: list[tuple[str, str]] = []  # to be told
        self._leaving: dict[str, int] = {}  # ticket -> attempt of what is dropped, until the manager knows
        self._unwanted: list[SampleMeta] = []  # to be freed
        self._arrived, self._sorted_out = asyncio.Event(), asyncio.Event()

    def on_samples(self, samples: Sequence[SampleMeta]) -> None:
        """Notice `samples_arrived` of a DP head. Copies of a group are refused, and freed where they lie."""
        samples = self._own(samples)
        added = self._buffer.add(samples)
        if added.rejected:
            log.warning("refused %d samples that came twice, of %s", added.rejected, samples[0].ticket_id)
        self._filtered += len(added.dropped)
        self._dropped.extend(added.dropped)
        dropped = {ticket_id for ticket_id, _ in added.dropped}
        self._leaving |= {sample.ticket_id: sample.attempt for sample in added.clear if sample.ticket_id in dropped}
        self._unwanted.extend(added.clear)
        if self._unwanted:
            self._sorted_out.set()
        self._arrived.set()

    def _own(self, samples: Sequence[SampleMeta]) -> list[SampleMeta]:
        """Those granted under this training side; the DP heads let no others in."""
        own = [sample for sample in samples if sample.trainer_incarnation == self.trainer_incarnation]
        if others := [sample for sample in samples if sample.trainer_incarnation != self.trainer_incarnation]:
            self._refused += len(others)
            self._unwanted.extend(others)
            first = others[0]
            log.warning(
                "refused %d samples of training side %r, of %s", len(others), first.trainer_incarnation, first.ticket_id
            )
        return own

    def held(self) -> list[tuple[str, int]]:
        """(ticket, attempt) of all that arrived and is neither trained nor given back: what the manager need not miss.

        Without the batch in training, which is reported by name.
        """
        return sorted({**self._leaving, **self._buffer.held()}.items())

    async def give_back(self) -> None:
        """Gives back what was sorted out on arrival; runs beside the steps until it is cancelled."""
        while True:
            await self._sorted_out.wait()
            self._sorted_out.clear()
            dropped, self._dropped = self._dropped, []
            unwanted, self._unwanted = self._unwanted, []
            await self._drop(dropped)
            await self._free(unwanted)

    async def next_batch(self, version: int) -> Taken:
        """Wait for a batch's worth of groups inside the staleness bound at ``version``; give back the too old.

        Raises StuckError when no further batch can come, and WaitTimeout naming what the manager is waiting for when no
        group arrives for ``request_timeout_s``.
        """
        asynchronous, train = self._config.asynchronous, self._config.train
        self._version, stale = version, 0
        while True:
            self._arrived.clear()
            batch = self._buffer.take(
                train.batch_groups, version, asynchronous.max_head_offpolicyness, asynchronous.stale_policy
            )
            stale += len(batch.dropped)
            await self._drop(batch.dropped)
            await self._free(batch.clear)
            if batch.groups:
                if not await self._claimed(batch):
                    continue
                return self._taken(batch, stale)
            if reason := filtered_out(self._buffer.filtered_in_a_row, train.batch_groups, train.ppo.filter):
                raise StuckError(f"master_worker: step {version + 1} can never get its batch: {reason}")
            await self._next_group(version + 1)

    async def _claimed(self, batch: Batch) -> bool:
        """Whether the ledger lets all of the batch be trained. What has ended meanwhile leaves the buffer: its attempts
        count as failed, though one of them arrived.
        """
        tickets = sorted(group[0].ticket_id for group in batch.groups)
        gone = (await self._manager.claim(ClaimRequest(self._version + 1, tickets, self.trainer_incarnation))).gone
        if gone:
            log.warning("%d groups arrived after their tickets had been given up: %s", len(gone), ", ".join(gone[:20]))
            await self._free(self._buffer.release(gone))
        return not gone

    def _taken(self, batch: Batch, stale: int) -> Taken:
        taken = Taken(batch.groups, stale, self._filtered, self._refused)
        self._filtered = self._refused = 0
        return taken

    async def _next_group(self, step: int) -> None:
        """Wait until samples arrive; meanwhile look now and then whether any will. Raises StuckError, WaitTimeout."""
        wanted, timeout = self._config.train.batch_groups, self._config.cluster.request_timeout_s
        check, deadline = StuckCheck(wanted), time.monotonic() + timeout
        while not await self._arrival(min(_LOOK_S, timeout)):
            await self._tell_held()  # else a group that was lost on its way would be waited for, here and there
            ready = self._buffer.ready_groups
            status = await self._manager.status()
            await self._mend(status)
            if reason := check.look(status, ready):
                raise StuckError(f"master_worker: step {step} can never get its batch: {reason}; see the workers' logs")
            if time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"master_worker: step {step} waited {timeout:g} s for a group; it has {ready} of {wanted}; "
                    f"the manager says: {await self._explain()}"
                )

    async def _arrival(self, timeout_s: float) -> bool:
        """Whether samples arrived in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            return False
        return True

    async def _explain(self) -> str:
        status = await self._manager.status()
        return f"admission {status.get('admission')}, ledger {status.get('ledger')}"

    async def _tell_held(self) -> None:
        request = TrainedRequest(self._version, self._version, incarnation=self.trainer_incarnation, held=self.held())
        if lost := (await self._manager.trained(request)).lost:
            log.warning("%d groups never arrived and are rolled out again: %s", len(lost), ", ".join(lost[:20]))

    async def _drop(self, dropped: list[tuple[str, str]]) -> None:
        """Tell the manager of groups that will not be trained."""
        if dropped:
            request = TrainedRequest(
                self._version, self._version, dropped=dropped, incarnation=self.trainer_incarnation
            )
            await self._manager.trained(request)
            for ticket_id, _ in dropped:
                self._leaving.pop(ticket_id, None)

    async def _free(self, samples: Sequence[SampleMeta]) -> None:
        """Free samples that will not be trained, each where the stream brought it."""
        by_owner: dict[int, list[str]] = {}
        for sample in samples:
            by_owner.setdefault(sample.owner, []).append(sample.sample_id)
        for owner, ids in sorted(by_owner.items()):
            await self._workers.clear([owner], ids)
