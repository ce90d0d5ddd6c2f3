"""An engine in a child process as a GenerationEngine: requests in, completions out, across restarts of the child.

HTTP handlers ──calls──> event loop of a thread:  Traffic (requests)  Updater (weights)  EngineSupervisor (the child)
                                                      └────────HTTP, loopback────────┴──────> the engine
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from realsys.config.schema import Config, SamplingConfig
from realsys.errors import GenerationError, WaitTimeout
from realsys.generation.backend import Change, Materialise, RequestSnapshot, WriteAdapters, refuse_adapter
from realsys.generation.child.adapters import Adapters
from realsys.generation.child.contract import EngineLaunch, EngineLoad
from realsys.generation.child.requests import KeptKeys, SplitRequest, Traffic
from realsys.generation.child.supervisor import EngineRun, EngineSupervisor, RunListener, Settings
from realsys.generation.child.update import PAUSE, SLEEP, Shapes, Updater
from realsys.generation.completion import Completion
from realsys.generation.protocol import AdapterWeights, PauseMode, SamplingParams, ServerInfo, UpdateResult
from realsys.generation.sampling_rules import Limits, read_tokenizer
from realsys.model_files.config_json import read_model

log = logging.getLogger(__name__)

T = TypeVar("T")

#: completions that run and wait in one server: more are refused, and another server takes them
MAX_ANSWERS = 8192
#: in a row, of an engine that died or hung, within half a minute; then the launcher's restarts begin
MAX_RESTARTS = 5
_INFO_TIMEOUT_S = 2.0
_CLOSE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Model:
    """The model that the engine serves. ``shapes`` by HF name; ``tokenizer`` is None if the model has none."""

    limits: Limits
    shapes: Shapes
    tokenizer: Tokenizer | None = None


class ChildEngine:
    """Thread-safe front of one engine and its successors.

    ``on_change`` is called on the event loop and must not block.
    """

    def __init__(
        self,
        launch: EngineLaunch,
        model: Model,
        materialise: Materialise,
        settings: Settings,
        on_change: Callable[[Change], None] = lambda change: None,
        write_adapters: WriteAdapters | None = None,
    ) -> None:
        self._name = launch.api.name
        self._started_with = str(launch.model_path)
        self._limits = model.limits
        self._tokenizer = model.tokenizer
        self._on_change = on_change
        keys = KeptKeys(keep=settings.keep_keys, reuse=settings.reuse_versions)
        self._traffic = Traffic(self._name, model.limits.capacity, keys)
        self._updater = Updater(
            self._traffic,
            model.shapes,
            materialise,
            ranks=launch.tensor,
            drain=settings.drain,
            timeout_s=settings.load_timeout_s,
        )
        if write_adapters is not None:
            self._traffic.adapters = Adapters(self._traffic, self._updater.between, write_adapters)
        listener = RunListener(self._up, self._down, held=lambda: bool(self._traffic.holds))
        self._supervisor = EngineSupervisor(launch, settings, listener)
        self._started: Future[None] = Future()
        self._loop = LoopThread(f"{self._name.lower()}-engine", self._keep)

    # ---- any thread

    def start(self) -> None:
        """Return when the engine serves. Raises GenerationError with its last lines if it does not start."""
        self._loop.start()
        try:
            self._started.result()  # the supervisor bounds the start
        except GenerationError:
            self.close()
            raise

    def abandon_start(self) -> None:
        """Make ``start`` raise if it still waits. Thread-safe."""
        with contextlib.suppress(InvalidStateError):
            self._started.set_exception(GenerationError(f"the start of {self._name} was cancelled: asked to stop"))

    def close(self) -> None:
        """Kill the engine; open calls fail with a retryable error."""
        self._loop.close(_CLOSE_TIMEOUT_S)

    @property
    def model_path(self) -> str:
        return self._traffic.path or self._started_with

    @property
    def version(self) -> int:
        """Version of the weights that sample now; UNSYNCED after every start of the engine."""
        return self._traffic.version

    @property
    def failure(self) -> str | None:
        """Reason why the engine does not serve now; None while it serves."""
        return self._traffic.failure

    def generate(
        self,
        rid: str,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        stream: bool = False,
        adapter: AdapterWeights | None = None,
    ) -> Future[list[Completion]]:
        """Sample the completions. Raises GenerationError for a bad request; the future raises all others."""
        if self._traffic.adapters is None:
            refuse_adapter(adapter)
        prompt = self._limits.checked_prompt(input_ids, params)
        seed = secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed
        stops = self._limits.stops(params)
        request = SplitRequest.of(rid or secrets.token_hex(16), prompt, params, stops, seed, self._tokenizer)
        request.streams, request.adapter = stream, adapter
        return self._loop.call(lambda: self._traffic.serve(request))

    def update(self, path: str, version: int, *, abort_all: bool = False) -> Future[UpdateResult]:
        return self._loop.call(lambda: self._updater.update(path, version, abort_all=abort_all))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop sampling. The engine does in_place and retract itself if it reports the version of every token."""
        return self._loop.call(lambda: self._updater.pause(mode))

    def resume(self) -> Future[None]:
        return self._loop.call(self._updater.resume)

    def sleep(self) -> Future[None]:
        """Release the engine's memory, if it was started so that it can."""
        return self._loop.call(self._updater.sleep)

    def wake(self) -> Future[None]:
        return self._loop.call(self._updater.wake)

    def flush(self) -> Future[None]:
        """Drop the engine's cache. It does so between two requests only: the call waits for that, and may fail."""
        return self._loop.call(self._flush)

    def abort(self, rid: str) -> Future[bool]:
        return self._loop.call(functools.partial(self._abort, rid))

    def snapshot(self, rid: str, beyond: int = -1) -> Future[RequestSnapshot | None]:
        """Return the state of a request. Without a stream, tokens are in it EVENT_TOKENS later at most."""
        return self._loop.call(functools.partial(self._snapshot, rid, beyond))

    def abort_all(self) -> Future[None]:
        return self._loop.call(self._abort_all)

    def info(self) -> Future[ServerInfo]:
        """Return load and counters. ``generated_tokens`` counts those received; engines do not report ``steps``."""
        return self._loop.call(self._info)

    # ---- the event loop

    async def _keep(self) -> None:
        try:
            await self._supervisor.keep()
        except GenerationError as error:
            self._traffic.down(str(error))
            try:
                self._started.set_exception(error)
            except InvalidStateError:  # it had started before
                self._on_change(Change(None, str(error), final=True))

    def _up(self, run: EngineRun) -> None:
        self._traffic.up(run)
        with contextlib.suppress(InvalidStateError):
            self._started.set_result(None)
        self._on_change(Change(run.serial))

    def _down(self, reason: str) -> None:
        self._traffic.down(reason)
        self._on_change(Change(None, reason))

    async def _snapshot(self, rid: str, beyond: int) -> RequestSnapshot | None:
        # While the engine samples, every request in it gets closer to its end.
        while (snapshot := self._traffic.snapshot(rid, self._supervisor.proofs)) and snapshot.tokens <= beyond:
            await self._traffic.moves(rid)
        return snapshot

    async def _flush(self) -> None:
        if self._traffic.run is not None and SLEEP not in self._traffic.holds:  # asleep it has no cache
            await self._traffic.run.api.idle()

    async def _abort(self, rid: str) -> bool:
        running = rid in self._traffic
        self._loop.spawn(self._recall_aborted(rid))
        return running

    async def _abort_all(self) -> None:
        self._loop.spawn(self._recall_aborted(None))

    async def _recall_aborted(self, rid: str | None) -> None:
        """Wait for the engine in a task: only the callers of the requests have to wait for their end."""
        try:
            await self._traffic.recall(self._traffic.abort(rid))
        except GenerationError as error:
            log.warning("abort of %s: %s", rid or "all requests", error)

    async def _info(self) -> ServerInfo:
        load, memory = EngineLoad(0, 0, 0), 0
        if (run := self._traffic.run) is not None:
            memory = await run.child.resident_bytes()
            try:
                load = await run.api.read_load(_INFO_TIMEOUT_S)
            except GenerationError as error:
                log.debug("%s does not report its load: %s", self._name, error)
        sent, held = self._traffic.open_completions()
        max_running = load.running or sent
        running = min(sent, max_running)
        asleep = SLEEP in self._traffic.holds  # then the engine's last report may be from before
        return ServerInfo(
            backend=self._name.lower(),
            weight_version=str(self.version),
            context_length=self._limits.context,
            max_running=max_running,
            max_queued=self._limits.capacity - max_running,
            running=running,
            queued=sent - running + held,
            kv_tokens=0 if asleep else load.used,
            kv_capacity=load.capacity,
            generated_tokens=self._traffic.tokens,
            steps=0,
            updates=self._updater.done,
            paused=not self._traffic.holds.isdisjoint((PAUSE, SLEEP)),
            busy_s=self._traffic.busy_s(),
            prefilled_tokens=self._traffic.input_tokens - self._traffic.reused_tokens,
            reused_tokens=self._traffic.reused_tokens,
            memory_bytes=memory,
        )


# ---- from the configuration to an engine


def build_child_engine(
    launch: EngineLaunch,
    config: Config,
    materialise: Materialise,
    on_change: Callable[[Change], None],
    *,
    context: int,
    tokenizer: Tokenizer | None,
    timeouts: tuple[float, float],
    grammars: bool = False,
    max_restarts: int = MAX_RESTARTS,
    write_adapters: WriteAdapters | None = None,
) -> ChildEngine:
    """Make an engine that is not started yet. ``timeouts``: seconds of its start, and without a token.

    ``write_adapters``: if it was started so that requests may name adapters.

    Raises ModelError for a model that realsys cannot train.
    """
    arch = read_model(launch.model_path)
    limits = Limits(
        vocabulary=arch.vocab,
        eos=arch.eos,
        context=context,
        capacity=MAX_ANSWERS,
        tokenizer=tokenizer is not None,
        model_path=str(launch.model_path),
        grammars=grammars,
    )
    settings = Settings(
        start_timeout_s=timeouts[0],
        max_restarts=max_restarts,
        load_timeout_s=config.manager.update_timeout_s,
        silence_timeout_s=timeouts[1],
        drain=not config.asynchronous.interruptible,
        keep_keys=config.asynchronous.kv_on_update == "keep",
        reuse_versions=config.asynchronous.kv_reuse_versions,
    )
    model = Model(limits, arch.tensor_shapes(), tokenizer)
    return ChildEngine(launch, model, materialise, settings, on_change, write_adapters)


def tokenizer_of(model_path: Path, sampling: SamplingConfig, options: Mapping[str, Any]) -> Tokenizer | None:
    """Return the model's tokenizer if the engine must load it."""
    return read_tokenizer(model_path) if needs_tokenizer(sampling, options) else None


def needs_tokenizer(sampling: SamplingConfig, options: Mapping[str, Any]) -> bool:
    """Return True if an engine needs a tokenizer: for stop strings and min_new_tokens, or because the user wants it.

    Otherwise one process of it would turn every sampled token into text that no caller reads.
    """
    skips = options.get("skip-tokenizer-init")
    return bool(sampling.stop or sampling.min_new_tokens) if skips is None else not skips


# ---- an event loop in its own thread, called from other threads


class LoopThread:
    """Runs ``main`` until it returns or ``close`` is called. Open calls then fail with a retryable error."""

    def __init__(self, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._main = main
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name=name, daemon=True)
        self._lock = threading.Lock()  # guards _loop and _tasks: a loop that has closed must get no work
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stop: asyncio.Event
        self._running = threading.Event()

    def start(self, timeout_s: float = 30.0) -> None:
        """Return when the loop accepts work. Raises WaitTimeout if it does not start."""
        self._thread.start()
        if not self._running.wait(timeout_s):
            raise WaitTimeout(f"thread {self._thread.name} did not start its event loop within {timeout_s:g} s")

    def close(self, timeout_s: float) -> None:
        """Cancel everything and wait for the end of the thread. Raises WaitTimeout."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise WaitTimeout(f"thread {self._thread.name} did not end within {timeout_s:g} s")

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run ``work()`` on the loop. Raises GenerationError if the thread has ended."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # a caller that leaves must abort, not cancel
        with self._lock:
            if self._loop is None:
                raise GenerationError("the server is stopping", retryable=True)
            self._loop.call_soon_threadsafe(self._spawn, work, future)
        return future

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run ``work`` as a task, kept until it is done. Call it on the loop."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, T]], future: Future[T]) -> None:
        task = asyncio.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._resolve, future))

    def _resolve(self, future: Future[T], task: asyncio.Task[T]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            future.set_exception(GenerationError("the server is stopping", retryable=True))
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # One thread is enough: its jobs (reading weights, removing files) run one after the other anyway.
        self._loop.set_default_executor(ThreadPoolExecutor(1, f"{self._thread.name}-files"))
        main = asyncio.create_task(self._main(), name="main")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        self._running.set()
        try:
            await asyncio.wait({main, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            with self._lock:
                self._loop = None
            await asyncio.sleep(0)  # work that was passed in before that becomes a task
            tasks = {main, stopping, *self._tasks}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not main.cancelled():
            main.result()  # an error in it ends the thread, and with it the process
