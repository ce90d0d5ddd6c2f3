"""An engine on devices that training ranks use in turn with it: built when it first wakes, and silent while it sleeps.

    start ──> asleep ──wake──> built, started ──sleep──> asleep ──wake──> awake ──> ...
                                                            └── it ends: the process ends, and starts asleep

So the process of a server has no memory on a device before the manager says that the ranks have left it, whenever it
starts. An engine in a child process that ends asleep would start again beside the ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from realsys.cluster.failpoint import failpoint
from realsys.errors import GenerationError
from realsys.generation.backend import ASLEEP, Change, EngineParts, GenerationEngine, RequestSnapshot
from realsys.generation.completion import Completion
from realsys.generation.protocol import (
    UNSYNCED,
    AdapterWeights,
    PauseMode,
    SamplingParams,
    ServerInfo,
    UpdateResult,
)

Build = Callable[[EngineParts], GenerationEngine]


class LentEngine:
    """The engine that ``build`` makes, once it may use its devices. Until then it refuses what needs one."""

    def __init__(self, build: Build, parts: EngineParts) -> None:
        self._build = build
        self._parts = parts
        self._engine: GenerationEngine | None = None
        self._sleeps = True
        self._order = threading.Lock()  # held while the engine is made
        self._waking: Future[None] | None = None  # the making of the engine, while it runs

    @property
    def model_path(self) -> str:
        return self._engine.model_path if self._engine else str(self._parts.model_path)

    @property
    def version(self) -> int:
        return self._engine.version if self._engine else UNSYNCED

    @property
    def failure(self) -> str | None:
        return self._engine.failure if self._engine else None

    def start(self) -> None:
        """Let the server be registered: it is asleep."""
        self._parts.on_change(Change(0))

    def close(self) -> None:
        if self._engine:
            self._engine.close()

    def sleep(self) -> Future[None]:
        """Release the memory, as any engine. One that is being made is made first."""
        self._sleeps = True
        failpoint("server.sleep")
        with self._order:
            return self._engine.sleep() if self._engine else self._waking or _done()

    def wake(self) -> Future[None]:
        """Take the memory again. The first time the engine is made in a thread: a repeated call waits for the same."""
        self._sleeps = False
        failpoint("server.wake")
        with self._order:
            if self._engine is not None:
                return self._engine.wake()
            if self._waking is None:
                self._waking = Future()
                threading.Thread(target=self._make, args=(self._waking,), name="engine-start", daemon=True).start()
            return self._waking

    def _make(self, made: Future[None]) -> None:
        try:
            engine = self._build(replace(self._parts, on_change=self._changed))
            engine.start()
            with self._order:
                self._engine, self._waking = engine, None
            if self._sleeps:  # it was made too late, and the ranks wait for its memory
                engine.sleep().result()
        except BaseException as error:
            reason = f"the engine does not start: {error}"
            self._parts.on_change(Change(None, reason, final=True))
            made.set_exception(GenerationError(reason, retryable=True))
        else:
            made.set_result(None)

    def _changed(self, change: Change) -> None:
        ends = change.serial is None and self._sleeps
        self._parts.on_change(replace(change, reason=f"{change.reason} (asleep)", final=True) if ends else change)

    # ---- calls that need an engine

    def generate(
        self,
        rid: str,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        stream: bool = False,
        adapter: AdapterWeights | None = None,
    ) -> Future[list[Completion]]:
        return self._made().generate(rid, input_ids, params, stream=stream, adapter=adapter)

    def snapshot(self, rid: str, beyond: int = -1) -> Future[RequestSnapshot | None]:
        return self._made().snapshot(rid, beyond)

    def update(self, path: str, version: int, *, abort_all: bool = False) -> Future[UpdateResult]:
        return self._made().update(path, version, abort_all=abort_all)

    def pause(self, mode: PauseMode) -> Future[None]:
        return self._engine.pause(mode) if self._engine else _done()

    def resume(self) -> Future[None]:
        return self._engine.resume() if self._engine else _done()

    def flush(self) -> Future[None]:
        return self._engine.flush() if self._engine else _done()

    def abort(self, rid: str) -> Future[bool]:
        return self._made().abort(rid)

    def abort_all(self) -> Future[None]:
        return self._engine.abort_all() if self._engine else _done()

    def info(self) -> ServerInfo | Future[ServerInfo]:
        return self._engine.info() if self._engine else _NOTHING

    def _made(self) -> GenerationEngine:
        if self._engine is None:
            raise GenerationError(ASLEEP, retryable=True)
        return self._engine


def _done() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


_NOTHING = ServerInfo("asleep", str(UNSYNCED), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, True, 0.0)
