"""The adapters that an engine in a child process has: it samples requests of all of them in one batch.

    request ──loaded?──no──> [waiting] ──> room ──> factors, verified ──> PEFT folder ──> engine ──> all that wait go on

The engine adds an adapter to the weights that it has loaded, so these must be the weights under the adapter: the
checksums are compared when it is loaded, and all adapters are loaded again after an update with other weights. At most
``MOST_ADAPTERS`` are loaded; the one that has been idle longest gives way. All of it is on the engine's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from realsys.config.device_memory import MOST_ADAPTERS
from realsys.errors import GenerationError, RealsysError, ServerBusy
from realsys.generation.backend import WriteAdapters
from realsys.generation.protocol import AdapterWeights

if TYPE_CHECKING:
    from realsys.generation.child.requests import SplitRequest, Traffic

log = logging.getLogger(__name__)

WAIT_S = 60.0  # time for which a request waits while all adapters that are loaded have requests
_LOAD_TIMEOUT_S = 120.0


@dataclass(slots=True, eq=False)
class _Loaded:
    """One adapter. ``name`` in the engine is None before it is loaded, and "" if it changes nothing.

    ``loads``: number of the weights to which it was added. ``used``: number of the last request that has ended.
    ``loading``: while it is loaded, or loaded again.
    """

    adapter: AdapterWeights
    name: str | None = None
    folder: Path = Path()
    loads: int = 0
    used: int = 0
    loading: asyncio.Task[None] | None = None
    users: set[str] = field(default_factory=set)
    waiting: set[SplitRequest] = field(default_factory=set)


class Adapters:
    """Owner of the adapters. ``between``: a time without updates; gives True if the last staged version is loaded."""

    def __init__(
        self,
        traffic: Traffic,
        between: Callable[[], AbstractAsyncContextManager[bool]],
        write: WriteAdapters,
    ) -> None:
        self._traffic = traffic
        self._between = between
        self._write = write
        self.most, self.wait_s = MOST_ADAPTERS, WAIT_S
        self._adapters: dict[AdapterWeights, _Loaded] = {}
        self._serials = itertools.count(1)
        self._order = asyncio.Lock()  # one is loaded at a time
        self._left = asyncio.Event()  # a request has ended

    def enter(self, request: SplitRequest) -> bool:
        """Return True if a request may be sent to the engine: its adapter is loaded, and stays until ``leave``."""
        if request.adapter is None:
            return True
        loaded = self._adapters.get(request.adapter)
        if loaded is None or loaded.loading is not None or loaded.loads != self._traffic.loads:
            return False
        assert loaded.name is not None
        loaded.users.add(request.rid)
        request.adapter_name = loaded.name
        return True

    def leave(self, request: SplitRequest) -> None:
        """Note the end of a request."""
        if request.adapter is not None and (loaded := self._adapters.get(request.adapter)) is not None:
            loaded.users.discard(request.rid)
            loaded.used = next(self._serials)
            self._left.set()

    async def load(self, request: SplitRequest) -> None:
        """Return when the adapter is loaded, or the request has something else to wait for. Raises GenerationError."""
        assert request.adapter is not None
        loaded = self._adapters.setdefault(request.adapter, _Loaded(request.adapter))
        if loaded.loading is None:
            loaded.loading = asyncio.create_task(self._load(loaded))
        loaded.waiting.add(request)
        try:
            await request.held_back()
        finally:
            loaded.waiting.discard(request)

    async def _load(self, loaded: _Loaded) -> None:
        key, problem = loaded.adapter.key, None
        try:
            async with self._order:
                await self._unload(loaded)  # it was added to other weights
                await self._make_room()
                await self._add(loaded)
        except Exception as error:  # a boundary: the other requests and adapters go on
            expected = isinstance(error, RealsysError)
            log.warning("adapter %s is not loaded: %s", key, error, exc_info=not expected)
            reason = f"adapter {key!r}: {error if expected else f'{type(error).__name__}: {error}'}"
            # Storage that all servers read is damaged for all of them.
            retryable = error.retryable if isinstance(error, GenerationError) else not expected
            busy = isinstance(error, ServerBusy)
            problem = ServerBusy(reason) if busy else GenerationError(reason, retryable=retryable)
            del self._adapters[loaded.adapter]
        loaded.loading = None
        for request in loaded.waiting:
            request.let_go(problem)

    async def _add(self, loaded: _Loaded) -> None:
        async with self._between() as staged:
            run, loads, name = self._traffic.serving(), self._traffic.loads, f"adapter-{next(self._serials)}"
            adapter, folder = loaded.adapter, run.scratch / name
            if await asyncio.to_thread(self._write, adapter.locator, adapter.version, folder, loaded=staged):
                await run.api.load_adapter(name, folder, _LOAD_TIMEOUT_S)
            else:
                name = ""
            loaded.name, loaded.folder, loaded.loads = name, folder, loads

    async def _make_room(self) -> None:
        """Forget the adapter that has been idle longest, if there is no room for one more. Raises ServerBusy."""
        deadline = asyncio.get_running_loop().time() + self.wait_s
        while len(here := [one for one in self._adapters.values() if one.name is not None]) >= self.most:
            idle = [one for one in here if not one.users and not one.waiting]
            if idle:
                oldest = min(idle, key=lambda one: one.used)
                del self._adapters[oldest.adapter]
                await self._unload(oldest)
                continue
            self._left.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._left.wait()
            except TimeoutError:
                problem = f"{self.most} others have requests: try again later or use another server"
                raise ServerBusy(problem) from None

    async def _unload(self, loaded: _Loaded) -> None:
        if loaded.name:
            with contextlib.suppress(GenerationError):  # the engine may be another one, which does not have it
                await self._traffic.serving().api.unload_adapter(loaded.name)
            await asyncio.to_thread(shutil.rmtree, loaded.folder, ignore_errors=True)
        loaded.name = None
