"""Bases of engines that run in one thread of this process: ThreadedEngine, and SimpleEngine for one function. No torch.

    any thread: generate, pause, abort, ... ──commands──> [mailbox] ──> engine thread: all commands, one turn,
                                                                        the snapshots that are due, repeat

The engine thread owns everything but the mailbox, so nothing else needs a lock. It waits in ``Mailbox.wait`` only. An
error in it ends all open calls with that error and leaves the thread, so that the process dies of it.

A turn of a SimpleEngine is one completion of one prompt. Commands run between two completions, so each completion is of
one weight version.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from realsys.config.backend_rules import DEFAULT_CAPACITY
from realsys.config.trial_sizes import longest_sequence
from realsys.errors import GenerationError, RealsysError, ServerBusy, WaitTimeout
from realsys.generation.backend import ASLEEP, Change, EngineParts, RequestSnapshot, refuse_adapter
from realsys.generation.completion import EMPTY, Completion
from realsys.generation.protocol import (
    UNSYNCED,
    AdapterWeights,
    PauseMode,
    SamplingParams,
    ServerInfo,
    UpdateResult,
)
from realsys.generation.sampling_rules import Limits, completion_seed, find_stop, read_tokenizer, window
from realsys.model_files.config_json import read_model
from realsys.observe.spans import Phases, now, span
from realsys.types import FinishReason

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Mailbox:
    """Commands for one engine thread, and the futures of all open calls.

    Every future is resolved, by a command or by ``end``. ``ended`` is the reason why the mailbox refuses
    calls, None while it accepts them.
    """

    def __init__(self) -> None:
        self.ended: str | None = None
        self._stopping = False
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._open: set[Future[Any]] = set()

    # ---- any thread

    def future(self) -> Future[Any]:
        """Create the future of a call. Raises GenerationError after the end."""
        future: Future[Any] = Future()
        # A caller that leaves must abort its request. A cancelled future would make set_result raise.
        future.set_running_or_notify_cancel()
        # Under the lock of ``end``: a future is either refused here or failed there, never missed.
        with self._wake:
            if self.ended is not None:
                raise GenerationError(self.ended, retryable=True)
            self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def post(self, command: Callable[[], None]) -> None:
        """Queue ``command`` for the engine thread."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Queue ``command`` for the engine thread and return the future of its result."""
        future: Future[T] = self.future()
        self.post(lambda: future.set_result(command()))
        return future

    def stop(self) -> None:
        """Make ``wait`` return False from now on."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    # ---- engine thread

    def wait(self, ready: Callable[[], object]) -> bool:
        """Block until a command is queued or ``ready()`` is true; return False after ``stop``."""
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or self._commands or ready())
            return not self._stopping

    def run(self) -> None:
        """Run the queued commands."""
        while self._commands:
            self._commands.popleft()()

    def end(self, reason: str) -> None:
        """Refuse new calls, and fail those that wait with a retryable error."""
        with self._wake:
            self.ended = reason
            waiting = list(self._open)
        # Outside the lock: a callback of a future may call ``future`` or ``post``.
        for future in waiting:
            if not future.done():
                future.set_exception(GenerationError(reason, retryable=True))


@dataclass(frozen=True, slots=True)
class _Watch:
    """A snapshot that is due when the request ``rid`` has more than ``beyond`` tokens, or has ended."""

    rid: str
    beyond: int
    found: Future[RequestSnapshot | None]


class ThreadedEngine(ABC):
    """Base of engines with one thread: the calls of a GenerationEngine that only post a command to it."""

    def __init__(self) -> None:
        self._mailbox = Mailbox()
        self._paused = False
        self._asleep = False  # from ``sleep`` to ``wake``
        self._loaded = True  # False from ``sleep`` to the next update
        self._watches: list[_Watch] = []  # belongs to the engine thread
        self._thread = threading.Thread(target=self._run, name="generation-engine", daemon=True)

    # ---- any thread

    @property
    def failure(self) -> str | None:
        """Reason why the engine serves no more; None while it serves."""
        return self._mailbox.ended

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop after the current turn; open calls fail with a retryable error."""
        self._mailbox.stop()
        join(self._thread, timeout_s)

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop taking turns and queue new requests.

        in_place keeps the cache of running completions and retract drops it; both continue at
        ``resume``. abort ends all requests with the tokens they have.
        """

        def pause() -> None:
            self._paused = True
            if mode == "abort":
                self._end_requests(None)
            elif mode == "retract":
                self._drop_cache()

        return self._mailbox.call(pause)

    def resume(self) -> Future[None]:
        """Continue after a pause."""

        def resume() -> None:
            self._paused = False

        return self._mailbox.call(resume)

    def sleep(self) -> Future[None]:
        """Stop taking turns, and release weights and cache. Requests wait until an update after ``wake``."""
        return self._mailbox.call(self._fall_asleep)

    def wake(self) -> Future[None]:
        """Take the memory again, for the update that loads the weights."""

        def wake() -> None:
            if self._asleep:
                self._allocate()
                self._asleep = False

        return self._mailbox.call(wake)

    def flush(self) -> Future[None]:
        """Drop the cached keys and values of completions that have ended."""
        return self._mailbox.call(self._flush)

    def abort(self, rid: str) -> Future[bool]:
        """End one request now, with the tokens it has. The result is False if no request has that id."""
        return self._mailbox.call(lambda: self._end_requests(rid))

    def snapshot(self, rid: str, beyond: int = -1) -> Future[RequestSnapshot | None]:
        """Return the state of a request once it has more than ``beyond`` tokens; None if it has ended."""
        watch = _Watch(rid, beyond, self._mailbox.future())
        self._mailbox.post(lambda: self._watches.append(watch))
        return watch.found

    def abort_all(self) -> Future[None]:
        """End all requests now, with the tokens they have."""

        def abort_all() -> None:
            self._end_requests(None)

        return self._mailbox.call(abort_all)

    # ---- engine thread

    def _run(self) -> None:
        try:
            while self._mailbox.wait(self._has_work):
                # All commands before the turn: a pause or an abort must not wait for many turns.
                self._mailbox.run()
                self._turn()
                self._watches = [watch for watch in self._watches if not self._tell(watch)]
        except BaseException as error:
            self._mailbox.end(f"the engine failed: {type(error).__name__}: {error}")
            raise
        self._mailbox.end("the server is stopping")

    def _tell(self, watch: _Watch) -> bool:
        """Return True if the snapshot was due."""
        snapshot = self._snapshot(watch.rid)
        if snapshot is not None and snapshot.tokens <= watch.beyond:
            return False
        watch.found.set_result(snapshot)
        return True

    @property
    def _samples(self) -> bool:
        """True if nothing forbids to sample."""
        return self._loaded and not self._paused

    def _fall_asleep(self) -> None:
        if not self._asleep:
            self._asleep, self._loaded = True, False
            self._release()

    @abstractmethod
    def _has_work(self) -> bool:
        """Return True if ``_turn`` has something to do without a command."""

    @abstractmethod
    def _turn(self) -> None:
        """Do one piece of work, or nothing; commands run before the next turn."""

    @abstractmethod
    def _end_requests(self, rid: str | None) -> bool:
        """End one request, or all if None, with the tokens they have. Return True if any ended."""

    @abstractmethod
    def _snapshot(self, rid: str) -> RequestSnapshot | None:
        """Return the state of a request; None if no request has that id."""

    def _drop_cache(self) -> None:  # noqa: B027  (an engine may have no cache)
        """Drop the cache of all completions, running or not."""

    def _flush(self) -> None:  # noqa: B027
        """Drop the cache of ended completions."""

    @abstractmethod
    def _release(self) -> None:
        """Release the memory of weights and cache; the version is UNSYNCED then."""

    def _allocate(self) -> None:  # noqa: B027
        """Take the memory again that ``_release`` has released."""


# ---- engines that complete one prompt at a time


@dataclass(slots=True, eq=False)
class _Request:
    """One prompt, and its completions so far."""

    rid: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    done: Future[list[Completion]]
    results: list[Completion] = field(default_factory=list)
    queued_at: int = field(default_factory=now)

    @property
    def waiting(self) -> int:
        return self.params.n - len(self.results)


class SimpleEngine(ThreadedEngine):
    """Base of simple engines: write ``complete``, and ``load_weights`` if the engine has weights.

    ``capacity`` is the number of completions that it queues: pass the result of the backend's ``capacity``.
    """

    def __init__(self, parts: EngineParts, *, capacity: int = DEFAULT_CAPACITY) -> None:
        super().__init__()
        config = parts.config
        arch = read_model(parts.model_path)
        self.parts = parts
        self._tokenizer = read_tokenizer(parts.model_path)
        self._limits = Limits(
            vocabulary=arch.vocab,
            eos=arch.eos,
            context=longest_sequence(config),
            capacity=capacity,
            tokenizer=self._tokenizer is not None,
            model_path=str(parts.model_path),
            top=False,
        )
        self._model_path = str(parts.model_path)
        self._version = UNSYNCED
        self._queue: deque[_Request] = deque()
        self._queued = 0  # completions
        self._running = 0
        self._tokens = 0
        self._completions = 0
        self._updates = 0
        self._busy_s = 0.0

    # ---- to write

    @abstractmethod
    def complete(self, input_ids: Sequence[int], params: SamplingParams) -> tuple[Sequence[int], Sequence[float]]:
        """Complete one prompt. Return tokens, and the natural log-prob of each in softmax(logits / temperature).

        ``params`` has n=1 and the ``sampling_seed`` of this completion. The base class cuts the result at
        the first stop token or stop string and at ``max_new_tokens``. Runs in the engine thread.
        """

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a verified version, tensors by HF name. Copy them: the next update overwrites their memory.

        Runs in the engine thread.
        """

    def release_weights(self) -> None:
        """Drop the weights, because the server sleeps; ``load_weights`` brings others. Runs in the engine thread."""

    # ---- any thread

    def start(self) -> None:
        super().start()
        self.parts.on_change(Change(0))

    @property
    def model_path(self) -> str:
        return self._model_path

    @property
    def version(self) -> int:
        return self._version

    def generate(
        self,
        rid: str,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        stream: bool = False,
        adapter: AdapterWeights | None = None,
    ) -> Future[list[Completion]]:
        """Queue a request and return the future of its completions.

        Raises GenerationError for a bad request; the future raises one for a full queue.
        """
        refuse_adapter(adapter)
        prompt: list[int] = self._limits.checked_prompt(input_ids, params).tolist()
        seed = secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed
        request = _Request(rid or secrets.token_hex(16), prompt, params, seed, self._mailbox.future())
        self._mailbox.post(lambda: self._submit(request))
        return request.done

    def update(self, path: str, version: int, *, abort_all: bool = False) -> Future[UpdateResult]:
        """Verify and load a weight version between two completions."""
        return self._mailbox.call(lambda: self._update(path, version, abort_all))

    def info(self) -> ServerInfo:
        """Take a snapshot without stopping the engine; its numbers may belong to two neighbouring completions."""
        return ServerInfo(
            backend=self.parts.config.generation.backend,
            weight_version=str(self._version),
            context_length=self._limits.context,
            max_running=1,
            max_queued=self._limits.capacity - 1,
            running=self._running,
            queued=self._queued,
            kv_tokens=0,
            kv_capacity=0,
            generated_tokens=self._tokens,
            steps=self._completions,
            updates=self._updates,
            paused=not self._samples,
            busy_s=self._busy_s,
        )

    # ---- engine thread

    def _has_work(self) -> bool:
        return bool(self._queue) and self._samples

    def _turn(self) -> None:
        if self._has_work():
            self._complete_one(self._queue[0])

    def _submit(self, request: _Request) -> None:
        limit = self._limits.capacity
        if any(queued.rid == request.rid for queued in self._queue):
            problem = f"rid={request.rid!r} is the id of a request in progress: ids must be unique"
            request.done.set_exception(GenerationError(problem))
        elif self._queued + request.params.n > limit:
            problem = f"queue full: {self._queued} completions wait, at most {limit} may: try again later"
            request.done.set_exception(ServerBusy(problem))
        else:
            self._queue.append(request)
            self._queued += request.params.n

    def _complete_one(self, request: _Request) -> None:
        """Add one completion to the first request of the queue, and deliver the request with its last one."""
        index = len(request.results)
        seed = completion_seed(request.seed, index)
        params = msgspec.structs.replace(request.params, n=1, sampling_seed=seed)
        self._queued -= 1
        self._running = 1
        phases = Phases(f"{request.rid}#{index}", "queue", request.queued_at)
        phases.enter("decode")
        start = time.perf_counter()
        tokens, logprobs = self.complete(request.prompt, params)
        self._busy_s += time.perf_counter() - start
        self._running = 0
        phases.enter("", version=self._version, tokens=len(tokens))
        result = self._completion(request, list(tokens), list(logprobs))
        self._tokens += len(result.tokens)
        self._completions += 1
        request.results.append(result)
        if not request.waiting:
            self._queue.remove(request)
            request.done.set_result(request.results)

    def _completion(self, request: _Request, tokens: list[int], logprobs: list[float]) -> Completion:
        """Check the result of ``complete``, and cut it at the end of the completion."""
        if not tokens or len(tokens) != len(logprobs):
            problem = f"complete() returned {len(tokens)} tokens and {len(logprobs)} log-probs"
            raise GenerationError(f"{problem}: return as many of both, at least one")
        if not np.isfinite(logprobs).all():
            raise GenerationError("complete() returned a log-prob that is not finite: return natural logarithms")
        if not 0 <= min(tokens) <= max(tokens) < self._limits.vocabulary:
            problem = f"complete() returned a token outside the vocabulary of {self._limits.vocabulary}"
            raise GenerationError(f"{problem}: return token ids of the model's tokenizer")
        length, reason, matched = self._end_of(request, tokens)
        return Completion.of(tokens[:length], logprobs[:length], [(self._version, length)], reason, matched=matched)

    def _end_of(self, request: _Request, tokens: list[int]) -> tuple[int, FinishReason, int | str | None]:
        """Find where a completion ends: its length, the reason, and the stop token or string."""
        params = request.params
        stops = self._limits.stops(params)
        limit = min(len(tokens), params.max_new_tokens)
        before = request.prompt[len(request.prompt) - params.answer_prefix :]
        for position in range(params.min_new_tokens, limit):
            if tokens[position] in stops:
                return position + 1, "stop", tokens[position]
            if params.stop and self._tokenizer is not None:
                tail = (before + tokens[: position + 1])[-window(params.stop) :]
                if (text := find_stop(self._tokenizer, tail, params.stop)) is not None:
                    return position + 1, "stop", text
        return limit, "length" if limit == params.max_new_tokens else "stop", None

    def _snapshot(self, rid: str) -> RequestSnapshot | None:
        request = next((queued for queued in self._queue if queued.rid == rid), None)
        if request is None:
            return None
        waiting = frozenset(range(len(request.results), request.params.n))
        return RequestSnapshot(request.results + [EMPTY] * len(waiting), waiting, self._completions)

    def _end_requests(self, rid: str | None) -> bool:
        """End one request, or all, with the completions they have; the missing ones are empty."""
        ended = [request for request in self._queue if rid is None or request.rid == rid]
        for request in ended:
            self._queue.remove(request)
            self._queued -= request.waiting
            request.done.set_result(request.results + [EMPTY] * request.waiting)
        return bool(ended)

    def _release(self) -> None:
        self.release_weights()
        self._version = UNSYNCED

    def _update(self, path: str, version: int, abort_all: bool) -> UpdateResult:
        if self._asleep:
            return UpdateResult(False, ASLEEP)
        start = time.perf_counter()
        try:
            with span("stage", f"version/{version}"):
                staged = self.parts.load(path, version)
        except Exception as error:  # a boundary: a bad version must not end serving the old one
            unexpected = not isinstance(error, RealsysError)
            _log.warning("update to version %d failed: %s", version, error, exc_info=unexpected)
            reason = f"{type(error).__name__}: {error}" if unexpected else str(error)
            return UpdateResult(False, reason, {"stage_s": time.perf_counter() - start})
        loading = time.perf_counter()
        if abort_all:
            self._end_requests(None)
        self.load_weights(staged.tensors)
        loaded = time.perf_counter()
        self._version = version
        self._model_path = path
        self._loaded = True
        self._updates += 1
        timings = {name: float(seconds) for name, seconds in staged.timings.items()}
        timings |= {"stage_s": loading - start, "pause_s": loaded - start, "load_s": loaded - loading}
        return UpdateResult(True, f"serving version {version}", timings, dict(staged.counts))


def join(thread: threading.Thread, timeout_s: float) -> None:
    """Wait until ``thread`` has ended. Raises WaitTimeout."""
    thread.join(timeout_s)
    if thread.is_alive():
        raise WaitTimeout(f"thread {thread.name} did not end within {timeout_s:g} s")
