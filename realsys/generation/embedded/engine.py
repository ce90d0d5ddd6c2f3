"""The embedded engine: one thread runs decode steps, another stages weights.

    HTTP handlers ──commands──> [mailbox] ──> engine thread:  commands, weight swap if one is ready, step, repeat
    update() ──> [staging queue] ──> staging thread: load, verify, fuse ──command──> engine thread: swap

The engine thread consumes commands and waits for the mailbox only. It alone changes the core, between two steps, so
the core needs no locks. An error in it ends all open calls with that error and leaves the thread, so that the process
dies of it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path

import torch

from realsys.cluster.failpoint import failpoint
from realsys.cluster.gpu_devices import choose_device
from realsys.cluster.process import trim_heap
from realsys.config.schema import GenerationConfig
from realsys.errors import GenerationError, RealsysError
from realsys.generation.backend import ASLEEP, LoadVersion, RequestSnapshot, Staged, refuse_adapter
from realsys.generation.completion import Completion
from realsys.generation.embedded.core import CoreSizes, EngineCore
from realsys.generation.embedded.decoder import ModelWeights, fuse, read_tensors
from realsys.generation.embedded.prefix_cache import KvPolicy
from realsys.generation.embedded.scheduler import Request
from realsys.generation.protocol import AdapterWeights, SamplingParams, ServerInfo, UpdateResult
from realsys.generation.sampling_rules import Limits, read_tokenizer
from realsys.generation.threaded import ThreadedEngine, join
from realsys.model_files.architecture import HfModel
from realsys.model_files.config_json import read_model
from realsys.observe import spans

_log = logging.getLogger(__name__)

_GONE = "the engine has slept since it got these weights: send the version again"


def build_engine(
    model_path: Path,
    config: GenerationConfig,
    load: LoadVersion,
    *,
    context: int = 0,
    dtype: torch.dtype = torch.float32,
    head_dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    interruptible: bool = True,
    kv: KvPolicy | None = None,
    on_step: Callable[[EngineCore], None] | None = None,
) -> EmbeddedEngine:
    """Read the model and allocate everything that the engine needs; the caller starts it.

    The engine begins with version -1 for any directory: only a verified update has a version.
    ``head_dtype`` is that of the logits, if it is not ``dtype``. ``context`` is the longest sequence in
    tokens, used if ``embedded.context_length`` is 0. Raises
    ModelError for a model that it cannot run, ConfigError if the KV cache does not fit, DeviceError if the
    process was given a GPU that it cannot use.
    """
    device = device or choose_device()
    embedded = config.embedded
    arch = read_model(model_path)
    weights = fuse(arch, read_tensors(model_path), dtype=dtype, device=device, head_dtype=head_dtype)
    sizes = CoreSizes(
        max_running=embedded.max_running,
        max_queued=embedded.max_queued,
        context=embedded.context_length or context,
        cache_rows=embedded.cache_rows,
    )
    core = EngineCore(arch, weights, sizes, read_tokenizer(model_path), kv)
    return EmbeddedEngine(core, load, model_path=str(model_path), interruptible=interruptible, on_step=on_step)


class EmbeddedEngine(ThreadedEngine):
    """Thread-safe front of an EngineCore.

    ``interruptible`` swaps weights in the middle of completions; otherwise running completions finish
    first while new ones wait. ``on_step`` is called in the engine thread after every step, for tests
    and measurements.
    """

    def __init__(
        self,
        core: EngineCore,
        load: LoadVersion,
        *,
        model_path: str = "",
        interruptible: bool = True,
        on_step: Callable[[EngineCore], None] | None = None,
    ) -> None:
        super().__init__()
        self.core = core
        self.model_path = model_path
        self._interruptible = interruptible
        self._on_step = on_step
        self._limits = Limits(
            vocabulary=core.arch.vocab,
            eos=core.arch.eos,
            context=core.context,
            capacity=core.scheduler.max_queued + core.scheduler.max_running,
            tokenizer=core.tokenizer is not None,
            model_path=model_path,
        )
        self._updates_done = 0
        self._ready: deque[Update | Future[None]] = deque()  # staged updates, and calls of ``sleep``, in their order
        self._swapped: Update | None = None  # its call returns with the first token of its version
        self._stager = Stager(core.arch, load, core.dtypes, core.staging_device, self._on_staged)

    # ---- any thread

    def start(self) -> None:
        super().start()
        self._stager.thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop after the current step; open calls fail with a retryable error."""
        # Asked to stop first, joined last: a version that is being read takes longest to end.
        self._stager.stop()
        super().close(timeout_s)
        join(self._stager.thread, timeout_s)

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""
        return self.core.version

    def beside(self, version: int, load: LoadVersion, staged: Staged) -> EmbeddedEngine:
        """Make an engine for the same model with other weights, of ``version``. Raises ModelError."""
        core = self.core.twin(self._stager.fuse(staged, self.core.device), version)
        return EmbeddedEngine(core, load, model_path=self._limits.model_path)

    def generate(
        self,
        rid: str,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        stream: bool = False,
        adapter: AdapterWeights | None = None,
    ) -> Future[list[Completion]]:
        """Queue a request and return the future of its n completions.

        Raises GenerationError for a bad request. The future raises one for a full queue (retryable) or
        an id in use. Adapters have engines of their own (``adapters.AdapterEngines``).
        """
        refuse_adapter(adapter)
        # Checked in the caller's thread: a bad request must not cost the engine thread anything.
        prompt = self._limits.checked_prompt(input_ids, params)
        seed = secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed
        stops = self._limits.stops(params)
        request = Request(rid or secrets.token_hex(16), prompt, params, seed, stops, self._mailbox.future())

        def submit() -> None:
            try:
                self.core.submit(request)
            except GenerationError as error:
                request.done.set_exception(error)

        self._mailbox.post(submit)
        return request.done

    def update(self, path: str, version: int, *, abort_all: bool = False) -> Future[UpdateResult]:
        """Load and verify a weight version in the background, then swap it in between two steps."""
        update = Update(path, version, abort_all, self._mailbox.future())
        self._stager.put(update)
        return update.done

    def sleep(self) -> Future[None]:
        """Release weights and cache between two steps, after the updates that are staged."""
        done: Future[None] = self._mailbox.future()
        self._mailbox.post(lambda: self._ready.append(done))
        return done

    def info(self) -> ServerInfo:
        """Take a snapshot without stopping the engine; its numbers may belong to two neighbouring steps."""
        core = self.core
        return ServerInfo(
            backend="embedded",
            weight_version=str(core.version),
            context_length=core.context,
            max_running=core.scheduler.max_running,
            max_queued=core.scheduler.max_queued,
            running=len(core.scheduler.active),
            queued=core.scheduler.queued,
            kv_tokens=core.cached_tokens,
            kv_capacity=core.scheduler.max_running * core.context,
            generated_tokens=core.counters.tokens,
            steps=core.counters.steps,
            updates=self._updates_done,
            paused=not self._samples,
            busy_s=core.counters.busy_s,
            retained_tokens=core.rows.tokens,
            prefilled_tokens=core.counters.prefilled,
            reused_tokens=core.counters.reused,
            evicted_tokens=core.rows.evicted.tokens,
        )

    def _on_staged(self, update: Update) -> None:
        # A command, because _ready belongs to the engine thread. It also wakes an idle engine.
        self._mailbox.post(lambda: self._ready.append(update))

    # ---- engine thread

    def _turn(self) -> None:
        # Without interruption, running completions must drain: new ones would keep the swap waiting.
        self.core.hold_admission = bool(self._ready) and not self._interruptible
        if self._swap_is_due:  # also while paused, so that an update does not wait for the resume
            due = self._ready.popleft()
            if isinstance(due, Update):
                self._swap(due)
            else:
                self._fall_asleep()
                due.set_result(None)
        elif self._samples and not self.core.idle:
            self.core.step()
            self._report()
            if self._on_step is not None:
                self._on_step(self.core)
        # Again, for a turn without a step: a pause or an abort may have left nothing to wait for.
        self._report()

    def _has_work(self) -> bool:
        return self._swap_is_due or (self._samples and not self.core.idle)

    @property
    def _swap_is_due(self) -> bool:
        # Without weights nothing that runs can end before the swap.
        return bool(self._ready) and (self._interruptible or not self._loaded or not self.core.scheduler.active)

    def _swap(self, update: Update) -> None:
        """Pause generation and replace the weights; all slow work was done in the staging thread."""
        if self._asleep or (update.weights is None and not self._loaded):
            # Staged before the sleep, perhaps as the weights that the engine had. The next one is read whole.
            self._stager.in_engine = False
            update.done.set_result(UpdateResult(False, ASLEEP if self._asleep else _GONE, update.timings))
            return
        start = time.perf_counter()
        if update.abort_all:
            self._end_requests(None)
        # The update before this one had no time to sample a token. Its call must return all the same.
        if self._swapped is not None:
            self._reply(self._swapped)
        loading = time.perf_counter()
        failpoint("server.load")
        if update.weights is None:
            self.core.relabel(update.version)
        else:
            self.core.swap(update.weights, update.version)
        self.model_path = update.path
        update.swapped_at = time.perf_counter()
        now = spans.now()
        spans.add("pause", now - int(1e9 * (update.swapped_at - start)), now, f"version/{update.version}")
        update.tokens_before = self.core.counters.tokens
        update.timings |= {
            "drain_s": start - update.staged_at,
            "pause_s": update.swapped_at - start,
            "load_s": update.swapped_at - loading,
        }
        self._updates_done += 1
        self._loaded = True
        self._swapped = update
        self.core.hold_admission = False

    def _report(self) -> None:
        """Complete the call of an update once its version has sampled a token, or has none to sample."""
        update = self._swapped
        if update is None:
            return
        # Reported with the first token, because the prefill after a swap is part of its cost.
        sampled = self.core.counters.tokens > update.tokens_before
        if sampled:
            update.timings["first_token_s"] = time.perf_counter() - update.swapped_at
        if sampled or not self._samples or self.core.idle:
            self._reply(update)

    def _reply(self, update: Update) -> None:
        self._swapped = None
        message = f"serving version {update.version}"
        update.done.set_result(UpdateResult(True, message, update.timings, update.counts))

    def _end_requests(self, rid: str | None) -> bool:
        scheduler = self.core.scheduler
        if rid is None:
            requests = list(scheduler.requests())
        else:
            requests = [request for request in (scheduler.find(rid),) if request is not None]
        for request in requests:
            self.core.abort(request)
        return bool(requests)

    def _snapshot(self, rid: str) -> RequestSnapshot | None:
        request = self.core.scheduler.find(rid)
        return None if request is None else self.core.snapshot(request)

    def _release(self) -> None:
        self.core.release()
        if self._swapped is not None:  # it would keep the weights
            self._reply(self._swapped)
        self._stager.in_engine = False
        trim_heap(0)

    def _allocate(self) -> None:
        self.core.allocate()

    def _drop_cache(self) -> None:
        self.core.drop_cache()

    def _flush(self) -> None:
        self.core.rows.forget()


# ---- new weights, read and fused while the engine decodes


@dataclass(slots=True, eq=False)
class Update:
    """One weight update in progress. Times are those of time.perf_counter."""

    path: str
    version: int
    abort_all: bool
    done: Future[UpdateResult]
    weights: ModelWeights | None = None  # None if the version has the weights of the one before
    timings: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    staged_at: float = 0.0
    swapped_at: float = 0.0
    tokens_before: int = 0  # tokens sampled from the engine's start to the swap


class Stager:
    """Thread that consumes updates in order, one at a time.

    It hands staged ones to ``on_ready``, and completes the call of a failed one with the reason.
    """

    def __init__(
        self,
        arch: HfModel,
        load: LoadVersion,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
        on_ready: Callable[[Update], None],
    ) -> None:
        self._arch = arch
        self._load = load
        self._dtype, self._head_dtype = dtypes
        self._device = device
        self._on_ready = on_ready
        self.in_engine = False  # the engine has, or will have, the version that was staged last
        self._todo: queue.SimpleQueue[Update | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="weight-staging", daemon=True)

    def put(self, update: Update) -> None:
        self._todo.put(update)

    def stop(self) -> None:
        """End the thread after the queued updates."""
        self._todo.put(None)

    def _run(self) -> None:
        while (update := self._todo.get()) is not None:
            start = time.perf_counter()
            try:
                staged, loaded = self._stage(update, in_engine=self.in_engine)
            except Exception as error:  # a boundary: a bad version must not stop serving the current one
                self.in_engine = False
                self._refuse(update, error, time.perf_counter() - start)
                continue
            staged.release()  # fused weights are copies
            self.in_engine = True
            update.staged_at = time.perf_counter()
            update.timings = {
                **{name: float(seconds) for name, seconds in staged.timings.items()},
                "stage_s": update.staged_at - start,
                "fuse_s": update.staged_at - loaded,
            }
            update.counts = dict(staged.counts)
            # Both names would keep a whole model alive until the next update: the tensors that were read,
            # and the version that the engine replaces later.
            del staged
            self._on_ready(update)
            del update

    def _stage(self, update: Update, *, in_engine: bool) -> tuple[Staged, float]:
        """Read and fuse the weights of ``update``. Returns what was read, and the time at which it was read."""
        with spans.span("stage", f"version/{update.version}"):
            staged = self._load(update.path, update.version, loaded=in_engine)
            loaded = time.perf_counter()
            # Else a version would count as unchanged that equals a refused one.
            if not (staged.unchanged and in_engine):
                update.weights = self.fuse(staged, self._device)
        return staged, loaded

    def fuse(self, staged: Staged, device: torch.device) -> ModelWeights:
        """Return copies of the tensors, fused. Raises ModelError if they do not fit the model."""
        return fuse(self._arch, staged.tensors, dtype=self._dtype, device=device, head_dtype=self._head_dtype)

    def _refuse(self, update: Update, error: Exception, stage_s: float) -> None:
        """Log why the update failed and report it to the caller."""
        expected = isinstance(error, RealsysError)
        level = logging.WARNING if expected else logging.ERROR
        _log.log(level, "update to version %d failed: %s", update.version, error, exc_info=not expected)
        reason = str(error) if expected else f"{type(error).__name__}: {error}"
        # InvalidStateError: the engine has ended and has failed all open calls, with this one.
        with contextlib.suppress(InvalidStateError):
            update.done.set_result(UpdateResult(False, reason, {"stage_s": stage_s}))
