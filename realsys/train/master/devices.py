"""The trainer's side of devices that it uses in turn with servers (``realsys.manager.routing.lending``).

take ──> the manager lets the servers sleep ──> models load, calls run: each brings its role to the device
give_back ──> all ranks leave the device ──> the manager lets the servers wake with the newest version
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from realsys.cluster.failpoint import failpoint
from realsys.errors import WaitTimeout
from realsys.manager.messages import DevicesReply, DevicesRequest
from realsys.observe.spans import span

HELD_S = 1.0  # that the manager holds a call: what it decides by changes with time, too


class Devices:
    """Devices of all ranks. Without lent servers (``shared`` False) they are the trainer's, and both calls do nothing.

    ``timeout_s`` bounds the wait for the servers; ``leave`` makes all ranks leave their devices.
    """

    def __init__(
        self,
        move: Callable[[DevicesRequest], Awaitable[DevicesReply]],
        leave: Callable[[], Awaitable[object]],
        *,
        incarnation: str,
        timeout_s: float,
        shared: bool,
    ) -> None:
        self.shared = shared
        self._move = move
        self._leave = leave
        self._incarnation = incarnation
        self._timeout_s = timeout_s
        self._turn: Literal["unknown", "trainer", "servers"] = "unknown"

    async def take(self, unit: str = "", *, batch: bool = True) -> bool:
        """Wait until all servers that share the devices sleep; True. ``batch``: there is one to train.

        Raises WaitTimeout with what it waits for.
        """
        if not self.shared or self._turn == "trainer":
            return True
        begin = time.monotonic()
        with span("switch", unit):
            while not (reply := await self._move(self._request("trainer", batch))).done:
                if time.monotonic() - begin > self._timeout_s:
                    waited = f"waited {self._timeout_s:g} s (cluster.request_timeout_s) for the devices"
                    raise WaitTimeout(f"master_worker: {waited}: {reply.reason}")
        self._turn = "trainer"
        failpoint("devices.taken")
        return True

    async def give_back(self) -> None:
        """Let the servers have the devices. The newest version must be published: they wake with it."""
        if not self.shared or self._turn == "servers":
            return
        await self._leave()
        failpoint("devices.left")
        await self._move(self._request("servers"))
        self._turn = "servers"

    async def repair(self, status: Mapping[str, Any]) -> None:
        """Tell a manager that has been restarted that the servers have the devices. ``status``: the manager's."""
        if self._turn == "servers" and status["devices"]["turn"] == "unknown":
            await self._move(self._request("servers"))

    def _request(self, turn: Literal["trainer", "servers"], batch: bool = True) -> DevicesRequest:
        return DevicesRequest(self._incarnation, turn, batch, HELD_S)
