"""Adapters beside the weights in training: each has an engine of its own, so that tenants are served side by side.

    generate(adapter) ──engine is there──────────────────────> engine of the adapter
           └──> [waiting requests] ──> loader thread: room, read, verify, fuse ──┘

An adapter costs a copy of the weights, and the cache that its completions have used. At most ``MOST_ADAPTERS`` are
loaded; the one that has been idle longest is closed for another. Updates of the main engine do not touch them.

One lock guards everything but the loading and closing of an engine, which only the loader does. It is held while a
request is passed on, so that no engine is closed under one. An engine thread that takes the lock holds no other.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from realsys.config.device_memory import MOST_ADAPTERS
from realsys.errors import GenerationError, RealsysError, ServerBusy
from realsys.generation.backend import ReadVersion, RequestSnapshot, Staged
from realsys.generation.completion import EMPTY, Completion
from realsys.generation.embedded.engine import EmbeddedEngine
from realsys.generation.protocol import AdapterWeights, PauseMode, SamplingParams, ServerInfo, UpdateResult
from realsys.generation.threaded import join

_log = logging.getLogger(__name__)

WAIT_S = 60.0  # time for which a request waits while all adapters that are loaded have requests
_STOPPING = "the server is stopping"
#: numbers of /server_info that are sums over all engines: those of now, and those since the start
_LOADS = ("running", "queued", "kv_tokens", "kv_capacity", "retained_tokens")
_TOTALS = ("generated_tokens", "steps", "busy_s", "prefilled_tokens", "reused_tokens", "evicted_tokens")


def _open() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # a caller that leaves must abort, not cancel
    return future


@dataclass(slots=True, eq=False)
class _Waiting:
    """One request with an adapter, until it ends. ``watches``: snapshots that are due when it has tokens."""

    loaded: _Loaded
    rid: str
    input_ids: Sequence[int]
    params: SamplingParams
    done: Future[list[Completion]] = field(default_factory=_open)
    watches: list[tuple[int, Future[RequestSnapshot | None]]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Loaded:
    """One adapter. ``engine`` is None until it is loaded; ``used``: number of the last request that has ended."""

    adapter: AdapterWeights
    since: float = field(default_factory=time.monotonic)
    engine: EmbeddedEngine | None = None
    used: int = 0
    requests: dict[str, _Waiting] = field(default_factory=dict)


class AdapterEngines:
    """A GenerationEngine: the main engine, and one for each adapter that requests name.

    ``most``: adapters that are loaded at a time. ``wait_s``: bound on the wait for room.
    """

    def __init__(
        self, main: EmbeddedEngine, read: ReadVersion, *, most: int = MOST_ADAPTERS, wait_s: float = WAIT_S
    ) -> None:
        self.main = main
        self._read = read
        self._most = most
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._adapters: dict[AdapterWeights, _Loaded] = {}
        self._requests: dict[str, _Waiting] = {}
        self._serials = itertools.count(1)
        self._past: Counter[str] = Counter()  # totals of the engines that were closed
        self._paused = self._asleep = self._ended = False
        self._woken = 0.0
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loader = threading.Thread(target=self._load_all, name="adapter-loading", daemon=True)

    # ---- any thread

    @property
    def model_path(self) -> str:
        return self.main.model_path

    @property
    def version(self) -> int:
        return self.main.version

    @property
    def failure(self) -> str | None:
        return self.main.failure

    def start(self) -> None:
        self.main.start()
        self._loader.start()

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            for loaded in list(self._adapters.values()):
                self._give_up(loaded, GenerationError(_STOPPING, retryable=True))
            engines = self._engines()
        self._jobs.put(None)
        for engine in engines:
            engine.close()
        if self._loader.ident is not None:
            join(self._loader, 10.0)

    def generate(
        self,
        rid: str,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        stream: bool = False,
        adapter: AdapterWeights | None = None,
    ) -> Future[list[Completion]]:
        """Queue a request. One whose adapter is not loaded waits for that, ``wait_s`` for room at most."""
        if adapter is None:
            return self.main.generate(rid, input_ids, params, stream=stream)
        rid = rid or secrets.token_hex(16)
        with self._changed:
            if self._ended:
                raise GenerationError(_STOPPING, retryable=True)
            if rid in self._requests:
                raise GenerationError(f"rid={rid!r} is the id of a request in progress: ids must be unique")
            loaded = self._adapters.get(adapter)
            if loaded is None:
                loaded = self._adapters[adapter] = _Loaded(adapter)
                self._jobs.put(partial(self._load, loaded))
            request = _Waiting(loaded, rid, input_ids, params)
            self._requests[rid] = loaded.requests[rid] = request
            if loaded.engine is not None:
                self._pass_on(request, loaded.engine)
        return request.done

    def snapshot(self, rid: str, beyond: int = -1) -> Future[RequestSnapshot | None]:
        with self._changed:
            request = self._requests.get(rid)
            engine = self.main if request is None else request.loaded.engine
            if engine is not None:
                return engine.snapshot(rid, beyond)
            assert request is not None
            due: Future[RequestSnapshot | None] = _open()
            if beyond < 0:
                n = request.params.n
                # Each adapter that is loaded brings it closer to its end.
                due.set_result(RequestSnapshot([EMPTY] * n, frozenset(range(n)), len(self._engines())))
            else:
                request.watches.append((beyond, due))
            return due

    def update(self, path: str, version: int, *, abort_all: bool = False) -> Future[UpdateResult]:
        return self.main.update(path, version, abort_all=abort_all)

    def pause(self, mode: PauseMode) -> Future[None]:
        with self._changed:
            self._paused = True
            if mode == "abort":
                self._end_waiting(None)
            return _all(engine.pause(mode) for engine in self._engines())

    def resume(self) -> Future[None]:
        with self._changed:
            self._paused = False
            return _all(engine.resume() for engine in self._engines())

    def sleep(self) -> Future[None]:
        """Release the memory of all engines. No adapter is loaded until ``wake``."""
        with self._changed:
            self._asleep = True
            return _all(engine.sleep() for engine in self._engines())

    def wake(self) -> Future[None]:
        """Take the memory again, and load the adapters again; the main engine needs an update."""
        with self._changed:
            woken = _all(engine.wake() for engine in self._engines())
            if self._asleep:
                self._asleep, self._woken = False, time.monotonic()
                self._changed.notify_all()
                for loaded in self._adapters.values():
                    if loaded.engine is not None:
                        again = loaded.engine.update(loaded.adapter.locator, loaded.adapter.version)
                        again.add_done_callback(partial(self._loaded_again, loaded))
            return woken

    def flush(self) -> Future[None]:
        with self._changed:
            return _all(engine.flush() for engine in self._engines())

    def abort(self, rid: str) -> Future[bool]:
        with self._changed:
            request = self._requests.get(rid)
            engine = self.main if request is None else request.loaded.engine
            if engine is not None:
                return engine.abort(rid)
            self._end_waiting(rid)
            return _done(True)

    def abort_all(self) -> Future[None]:
        with self._changed:
            self._end_waiting(None)
            return _all(engine.abort_all() for engine in self._engines())

    def info(self) -> ServerInfo:
        """Return limits and version of the main engine, with load and totals of all."""
        with self._changed:
            infos = [engine.info() for engine in self._engines()]
            waiting = sum(r.params.n for r in self._requests.values() if r.loaded.engine is None)
            sums = {name: sum(getattr(info, name) for info in infos) for name in _LOADS + _TOTALS}
            sums = {name: value + self._past[name] for name, value in sums.items()}
        return msgspec.structs.replace(infos[0], **sums | {"queued": sums["queued"] + waiting})

    # ---- with the lock

    def _engines(self) -> list[EmbeddedEngine]:
        return [self.main, *(one.engine for one in self._adapters.values() if one.engine is not None)]

    def _pass_on(self, request: _Waiting, engine: EmbeddedEngine) -> None:
        try:
            sampled = engine.generate(request.rid, request.input_ids, request.params)
        except GenerationError as error:
            self._end(request, partial(request.done.set_exception, error))
            return
        while request.watches:
            beyond, due = request.watches.pop()
            engine.snapshot(request.rid, beyond).add_done_callback(partial(_copy, due))
        sampled.add_done_callback(lambda done: self._end(request, partial(_copy, request.done, done)))

    def _end(self, request: _Waiting, deliver: Callable[[], None]) -> None:
        """Forget a request, and deliver its result. Also called by the engine's thread."""
        with self._changed:
            del self._requests[request.rid], request.loaded.requests[request.rid]
            request.loaded.used = next(self._serials)
            self._changed.notify_all()
        deliver()
        for _, due in request.watches:
            due.set_result(None)

    def _end_waiting(self, rid: str | None) -> None:
        """End a request that waits for its adapter, or all of them, without tokens."""
        for request in list(self._requests.values()):
            if request.loaded.engine is None and rid in (None, request.rid):
                self._end(request, partial(request.done.set_result, [EMPTY] * request.params.n))

    def _give_up(self, loaded: _Loaded, error: GenerationError) -> None:
        """Forget an adapter that is not loaded, and end the requests that wait for it."""
        if loaded.engine is None:
            self._adapters.pop(loaded.adapter, None)
            for request in list(loaded.requests.values()):
                self._end(request, partial(request.done.set_exception, error))

    # ---- the loader thread

    def _load_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _load(self, loaded: _Loaded) -> None:
        """Load an adapter, and pass its requests on to its engine; or end them with the reason."""
        adapter = loaded.adapter
        try:
            if not self._make_room(loaded):
                return
            start = time.perf_counter()
            engine = self.main.beside(adapter.version, self._read_again, self._read(adapter.locator, adapter.version))
            engine.start()
            _log.info("adapter %s is loaded in %.2f s", adapter.key, time.perf_counter() - start)
        except Exception as error:  # a boundary: the other requests and adapters go on
            expected = isinstance(error, RealsysError)
            _log.warning("adapter %s is not loaded: %s", adapter.key, error, exc_info=not expected)
            # Storage that all servers read is damaged for all of them.
            retryable = error.retryable if isinstance(error, GenerationError) else not expected
            reason = str(error) if expected else f"{type(error).__name__}: {error}"
            kind = ServerBusy if isinstance(error, ServerBusy) else partial(GenerationError, retryable=retryable)
            with self._changed:
                self._give_up(loaded, kind(f"adapter {adapter.key!r}: {reason}"))
            return
        with self._changed:
            if not self._ended:
                loaded.engine = engine
                if self._paused:
                    engine.pause("in_place")
                if self._asleep:
                    engine.sleep()
                for request in list(loaded.requests.values()):
                    self._pass_on(request, engine)
                return
        engine.close()

    def _make_room(self, loaded: _Loaded) -> bool:
        """Wait until another adapter fits, and close the one that has been idle longest. False if none is needed.

        Raises ServerBusy if all have requests for ``wait_s``.
        """
        while True:
            with self._changed:
                if self._ended:
                    return False
                if not loaded.requests:  # all were aborted
                    self._adapters.pop(loaded.adapter, None)
                    return False
                others = [one for one in self._adapters.values() if one.engine is not None]
                idle = min((one for one in others if not one.requests), key=lambda one: one.used, default=None)
                if not self._asleep:
                    if len(others) < self._most:
                        return True
                    if idle is not None:
                        del self._adapters[idle.adapter]
                    elif not self._changed.wait(max(loaded.since, self._woken) + self._wait_s - time.monotonic()):
                        problem = f"{self._most} others have requests: try again later or use another server"
                        raise ServerBusy(problem)
                else:
                    self._changed.wait()
                    idle = None
            if idle is not None:
                self._close(idle)

    def _close(self, loaded: _Loaded) -> None:
        """Close the engine of an adapter that is forgotten, and add its totals to those of the past."""
        assert loaded.engine is not None
        info = loaded.engine.info()
        with self._changed:
            self._past.update({name: getattr(info, name) for name in _TOTALS})
        loaded.engine.close()

    def _read_again(self, locator: str, version: int, *, loaded: bool = False) -> Staged:
        return self._read(locator, version)

    def _loaded_again(self, loaded: _Loaded, result: Future[UpdateResult]) -> None:
        """Give an adapter up whose weights are no longer there. Its requests may be sent again, and get the reason."""
        if result.exception() is None and not result.result().success:

            def close() -> None:
                with self._changed:
                    self._adapters.pop(loaded.adapter, None)
                self._close(loaded)

            self._jobs.put(close)


# ---- futures that are resolved here


def _done(value: Any) -> Future[Any]:
    future = _open()
    future.set_result(value)
    return future


def _copy(target: Future[Any], source: Future[Any]) -> None:
    error = source.exception()
    if error is None:
        target.set_result(source.result())
    else:
        target.set_exception(error)


def _all(futures: Iterable[Future[None]]) -> Future[None]:
    """Return a future of the end of all, with the first error of one."""
    futures, every = list(futures), _open()
    left = itertools.count(len(futures) - 1, -1)

    def ended(_: Future[None]) -> None:
        if next(left):
            return
        with contextlib.suppress(StopIteration):
            every.set_exception(next(error for future in futures if (error := future.exception()) is not None))
            return
        every.set_result(None)

    for future in futures:
        future.add_done_callback(ended)
    return every
