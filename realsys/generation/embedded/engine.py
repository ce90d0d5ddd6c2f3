"""The embedded engine: one thread runs decode steps, another stages weights.

    HTTP handlers ──commands──> [mailbox] ──> engine thread:  commands, weight swap if one is ready, step, repeat
    update() ──> [staging queue] ──> staging thread: load, verify, fuse ──command──> engine thread: swap

The engine thread consumes commands and waits for the mailbox only. It alone changes the core, between two steps, so
the core needs no locks. An error in it ends all open calls with that error and leaves the thread, so that the process
dies of it.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from realsys.cluster.failpoint import failpoint
from realsys.errors import GenerationError
from realsys.generation.backend import Completion, Load, Snapshot
from realsys.generation.embedded.core import EngineCore
from realsys.generation.embedded.scheduler import Request
from realsys.generation.embedded.staging import Stager, Update
from realsys.generation.limits import Limits
from realsys.generation.protocol import SamplingParams, ServerInfo, UpdateResult
from realsys.generation.threaded import ThreadedEngine, join
from realsys.observe import spans


class Engine(ThreadedEngine):
    """Thread-safe front of an EngineCore.

    ``interruptible`` swaps weights in the middle of completions; otherwise running completions finish
    first while new ones wait. ``on_step`` is called in the engine thread after every step, for tests
    and measurements.
    """

    def __init__(
        self,
        core: EngineCore,
        load: Load,
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
        self._ready: deque[Update] = deque()  # staged updates that wait for their swap
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

    def generate(self, rid: str, input_ids: Sequence[int], params: SamplingParams) -> Future[list[Completion]]:
        """Queue a request and return the future of its n completions.

        Raises GenerationError for a bad request. The future raises one for a full queue (retryable) or
        an id in use.
        """
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
            paused=self._paused,
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
            self._swap(self._ready.popleft())
        elif not self._paused and not self.core.idle:
            self.core.step()
            self._report()
            if self._on_step is not None:
                self._on_step(self.core)
        # Again, for a turn without a step: a pause or an abort may have left nothing to wait for.
        self._report()

    def _has_work(self) -> bool:
        return self._swap_is_due or not (self._paused or self.core.idle)

    @property
    def _swap_is_due(self) -> bool:
        return bool(self._ready) and (self._interruptible or not self.core.scheduler.active)

    def _swap(self, update: Update) -> None:
        """Pause generation and replace the weights; all slow work was done in the staging thread."""
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
        if sampled or self._paused or self.core.idle:
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

    def _snapshot(self, rid: str) -> Snapshot | None:
        request = self.core.scheduler.find(rid)
        return None if request is None else self.core.snapshot(request)

    def _drop_cache(self) -> None:
        self.core.drop_cache()

    def _flush(self) -> None:
        self.core.rows.forget()
