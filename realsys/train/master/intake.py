"""The shell of the intake: carries the decisions of ``IntakeState`` to the manager and to the workers.

    notices ──on_samples──> IntakeState ──next_batch──> claimed at the manager ──> groups of one step
                                 └──report_drops──> reported to the manager, which reissues or replaces them; freed

Consumes the notices of the DP heads. ``next_batch`` waits for the groups of a batch; each arrival
unblocks it. ``report_drops`` runs while the steps run, so a group that is dropped on arrival frees
its quota before the step ends.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from realsys.manager.client import ManagerClient
from realsys.manager.messages import ClaimRequest, TrainedRequest
from realsys.train.master.intake_decisions import IntakeState, TrainBatch
from realsys.train.master.model_workers import ModelWorkers
from realsys.train.master.request_evaluations import Repair
from realsys.types import SampleMeta

log = logging.getLogger(__name__)

_STATUS_INTERVAL_S = 5.0  # between two reads of the manager's status while no group arrives


class Intake:
    """The groups between the stream and the steps. ``state`` decides about them."""

    def __init__(self, state: IntakeState, workers: ModelWorkers, manager: ManagerClient, repair: Repair) -> None:
        """``repair``: called with the manager's status while no group arrives."""
        self.state = state
        self._workers = workers
        self._manager = manager
        self._repair = repair
        self._arrived = asyncio.Event()
        self._work_left = asyncio.Event()  # wakes report_drops

    def on_samples(self, samples: Sequence[SampleMeta]) -> None:
        """Take the samples of a notice `samples_arrived`."""
        self.state.add(samples)
        if self.state.departures:
            self._work_left.set()
        self._arrived.set()

    async def report_drops(self) -> None:
        """Report and free the groups that were dropped on arrival, until cancelled."""
        while True:
            await self._work_left.wait()
            self._work_left.clear()
            await self._carry_out()

    async def next_batch(self, version: int, groups: int = 0, timeout_s: float = math.inf) -> TrainBatch | None:
        """Wait for ``groups`` groups (0: those of a batch) to train on top of ``version``, and claim them.

        Returns None after ``timeout_s``. Raises StuckError when no further batch can come, PromptsUsedUp if that is the
        end of the epochs, and WaitTimeout with the manager's state when no group arrives for
        ``cluster.request_timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            # Cleared before the buffer is read: a group that arrives in between must not go
            # unnoticed.
            self._arrived.clear()
            tickets = self.state.propose(version, groups)
            await self._carry_out()
            if not tickets:
                if time.monotonic() >= deadline:
                    return None
                await self._next_group(deadline)
                continue
            request = ClaimRequest(version + 1, tickets, self.state.trainer_incarnation)
            batch = self.state.conclude((await self._manager.claim(request)).gone)
            await self._carry_out()
            if batch is not None:
                if batch.masked:
                    assert batch.oldest_trained is not None, "tokens are masked under policies mask and drop only"
                    await self._workers.mask(_by_owner(batch.masked), batch.oldest_trained)
                return batch

    async def _next_group(self, deadline: float) -> None:
        """Wait until samples arrive, or until ``deadline``.

        Every few seconds check that some still can. Raises PromptsUsedUp, StuckError, WaitTimeout.
        """
        self.state.begin_wait(time.monotonic())
        while not await self._arrival(
            min(_STATUS_INTERVAL_S, self.state.settings.timeout_s, deadline - time.monotonic())
        ):
            if time.monotonic() >= deadline:
                return
            # The manager counts a group that was lost in transit as finished, so it grants no
            # other. Only this report shows the loss.
            if lost := (await self._manager.trained(self._request(held=self.state.held()))).lost:
                log.warning("%d groups never arrived and are reissued: %s", len(lost), ", ".join(lost[:20]))
            status = await self._manager.status()
            await self._repair(status)
            self.state.check_wait(status, time.monotonic())

    async def _arrival(self, timeout_s: float) -> bool:
        """Return True if samples arrive within ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            return False
        return True

    async def _carry_out(self) -> None:
        """Report the groups that will not be trained, and free their samples on the workers that received them."""
        # Taken out before the first await: on_samples may append while a report is on its way.
        departures = self.state.depart()
        if departures.dropped or departures.stale:
            await self._manager.trained(self._request(dropped=departures.dropped, stale=departures.stale))
            self.state.reported(departures)
        if departures.free:
            # Sent in this order, and workers serve requests in order: a group is kept before it is cleared.
            kept = [self._workers.keep_dropped(departures.kept)] if departures.kept else []
            await asyncio.gather(*kept, self._workers.clear(_by_owner(departures.free)))

    def _request(self, **fields: Any) -> TrainedRequest:
        version = self.state.version
        return TrainedRequest(version, version, incarnation=self.state.trainer_incarnation, **fields)


def _by_owner(samples: Sequence[SampleMeta]) -> dict[int, list[str]]:
    """Return worker -> ids of the samples that it holds, sorted by worker."""
    ids: dict[int, list[str]] = {}
    for sample in samples:
        ids.setdefault(sample.owner, []).append(sample.sample_id)
    return dict(sorted(ids.items()))
