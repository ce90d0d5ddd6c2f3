"""What arrives from rollout, until it is a batch.

    notices ──on_samples──> buffer ──next_batch──> groups of one step
                              │ copies, success rate out of bounds (at once), too stale (at the next batch)
                              └──> told to the manager, which gives the quota to another prompt; freed on their owners

Consumes the notices of the DP heads; ``next_batch`` waits for a batch's worth of groups and is unblocked by the arrival
of one; ``give_back`` runs beside the steps, so that what is sorted out on arrival does not hold quota while one trains.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from realsys.admission.messages import TrainedRequest
from realsys.buffer.replay import Batch, Keep, SequenceBuffer
from realsys.config.schema import Config
from realsys.errors import StuckError, WaitTimeout
from realsys.master.stuck import StuckCheck, filtered_out
from realsys.master.workers import ModelWorkers
from realsys.rollout.manager_client import ManagerClient
from realsys.types import SampleMeta

log = logging.getLogger(__name__)

_LOOK_S = 5.0  # between two looks at the manager's status while no group arrives


@dataclass(frozen=True, slots=True)
class Taken:
    """The groups of a step, and how many groups were dropped since the batch before, by reason."""

    groups: list[list[SampleMeta]]
    dropped_stale: int
    dropped_filtered: int

    @property
    def samples(self) -> list[SampleMeta]:
        return [sample for group in self.groups for sample in group]


class Intake:
    """The buffer between the stream and the steps. ``keep``: whether a group is worth training on."""

    def __init__(self, config: Config, *, keep: Keep, workers: ModelWorkers, manager: ManagerClient) -> None:
        self._config, self._workers, self._manager = config, workers, manager
        self._buffer = SequenceBuffer(config.rollout.group_size, keep)
        self._version = 0
        self._filtered = 0  # groups since the last batch
        self._dropped: list[tuple[str, str]] = []  # to be told
        self._unwanted: list[SampleMeta] = []  # to be freed
        self._arrived, self._sorted_out = asyncio.Event(), asyncio.Event()

    def on_samples(self, samples: Sequence[SampleMeta]) -> None:
        """Notice `samples_arrived` of a DP head. Copies of a group are refused, and freed where they lie."""
        added = self._buffer.add(samples)
        if added.rejected:
            log.warning("refused %d samples that came twice, of %s", added.rejected, samples[0].ticket_id)
        self._filtered += len(added.dropped)
        self._dropped.extend(added.dropped)
        self._unwanted.extend(added.clear)
        if added.clear:
            self._sorted_out.set()
        self._arrived.set()

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
                return self._taken(batch, stale)
            if reason := filtered_out(self._buffer.filtered_in_a_row, train.batch_groups, train.ppo.filter):
                raise StuckError(f"master_worker: step {version + 1} can never get its batch: {reason}")
            await self._next_group(version + 1)

    def _taken(self, batch: Batch, stale: int) -> Taken:
        filtered, self._filtered = self._filtered, 0
        return Taken(batch.groups, stale, filtered)

    async def _next_group(self, step: int) -> None:
        """Wait until samples arrive; meanwhile look now and then whether any will. Raises StuckError, WaitTimeout."""
        wanted, timeout = self._config.train.batch_groups, self._config.cluster.request_timeout_s
        check, deadline = StuckCheck(wanted), time.monotonic() + timeout
        while not await self._arrival(min(_LOOK_S, timeout)):
            ready = self._buffer.ready_groups
            if reason := check.look(await self._manager.status(), ready):
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

    async def _drop(self, dropped: list[tuple[str, str]]) -> None:
        """Tell the manager of groups that will not be trained."""
        if dropped:
            await self._manager.trained(TrainedRequest(self._version, self._version, dropped=dropped))

    async def _free(self, samples: Sequence[SampleMeta]) -> None:
        """Free samples that will not be trained, each where the stream brought it."""
        by_owner: dict[int, list[str]] = {}
        for sample in samples:
            by_owner.setdefault(sample.owner, []).append(sample.sample_id)
        for owner, ids in sorted(by_owner.items()):
            await self._workers.clear([owner], ids)
