"""The run as the status page shows it: its phase, and the fields of the last step."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from realsys.cluster.worker import WorkerContext
from realsys.master.publish import set_key
from realsys.master.step_log import StepLog


class RunStatus:
    """The phase of the run, in the step log, the heartbeat and the name store."""

    def __init__(self, ctx: WorkerContext, step_log: StepLog) -> None:
        self._ctx = ctx
        self._log = step_log
        self._phase = "start"
        self._fields: dict[str, Any] = {}

    async def enter(self, phase: str) -> None:
        """Begin ``phase``.

        Raises NameStoreError if the name store stays away for longer than a lease.
        """
        self._log.append({"kind": "phase", "phase": phase, "time": time.time()})
        self._ctx.set_state(phase)
        self._phase = phase
        await self.show({})

    async def show(self, fields: dict[str, Any]) -> None:
        """Publish ``fields`` for the status page; each stays until a later call replaces it."""
        self._fields.update(fields)
        value = msgspec.json.encode({"phase": self._phase, "time": time.time(), **self._fields}).decode()
        ctx = self._ctx
        await set_key(ctx.store, ctx.names.status, value, ctx.config.cluster.lease_s, ctx.check_alive)
