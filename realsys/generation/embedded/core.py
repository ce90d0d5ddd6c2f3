"""The embedded engine without its thread: continuous batching, one step at a time.

    step:  admit ──> prefill within the budget ──> decode all running rows ──> sample ──> store ──> finish

The prefill of a prompt stops before its last token; feeding that one through ``decode`` gives the first logits.

Invariants
    last-uncached   The cache holds all tokens of a completion but the last, for new prompts and for interrupted
                    completions alike. Recovery from a weight update is therefore the same prefill, over prompt and
                    tokens so far, a budget at a time; completions that are through it decode already.
    batch-is-owner  While a batch exists, it alone knows the lengths of the running completions. ``_retire_batch``
                    writes them back; it must run before anything reads or changes a running completion.
    one-version     A token belongs to the version whose weights computed its logits and all cached keys and values
                    that they read. ``swap`` therefore drops the cache of everything, running or not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from realsys.errors import GenerationError
from realsys.generation.backend import Completion, Snapshot
from realsys.generation.embedded.forward.batch import Batch, PrefillBatch
from realsys.generation.embedded.forward.kv_cache import CacheShape, KVCache
from realsys.generation.embedded.forward.model import Decoder
from realsys.generation.embedded.forward.sampler import sample
from realsys.generation.embedded.forward.token_store import TokenStore
from realsys.generation.embedded.forward.weights import ModelWeights
from realsys.generation.embedded.layout import LayoutPlanner
from realsys.generation.embedded.prefill import Part, plan_pass
from realsys.generation.embedded.results import EMPTY, read_result, snapshot_of
from realsys.generation.embedded.scheduler import LiveCompletion, Request, Scheduler
from realsys.generation.protocol import UNSYNCED
from realsys.generation.stop_strings import find_stop, window
from realsys.generation.uniforms import uniforms
from realsys.hf.architecture import HfModel
from realsys.types import FinishReason

#: upper bound on the entries of the attention mask of a prefill pass
_MASK_ENTRIES = 1 << 24
#: bytes of KV cache that can be read in the time that one more group of rows costs per layer
_GROUP_COST = {"cpu": 200_000, "cuda": 64_000_000}


@dataclass(frozen=True, slots=True)
class CoreSizes:
    """Sizes of an EngineCore.

    max_running     completions that decode together
    max_queued      completions that wait
    context         tokens of the longest sequence, prompt and completion
    prefill_tokens  upper bound on the tokens computed between two decoding steps
    """

    max_running: int
    max_queued: int
    context: int
    prefill_tokens: int = 1024


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    tokens: int = 0
    prefilled: int = 0  # prompt and completion tokens computed by prefill, without padding
    busy_s: float = 0.0


class Ended(NamedTuple):
    """A completion that has ended, and why. ``matched``: the stop token or stop string."""

    completion: LiveCompletion
    reason: FinishReason
    matched: int | str | None = None


class EngineCore:
    """Owner of model, cache, tokens and schedule. Not thread-safe: one thread makes all calls.

    ``tokenizer`` serves stop strings; None if the model directory has none.
    """

    def __init__(
        self,
        arch: HfModel,
        weights: ModelWeights,
        sizes: CoreSizes,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        embedding = weights.embedding
        shape = CacheShape(
            layers=arch.layers,
            rows=sizes.max_running + 1,  # the extra row is for the completion whose prompt is computed in parts
            kv_heads=arch.kv_heads,
            context=sizes.context,
            head_dim=arch.head_dim,
        )
        cache = KVCache(shape, embedding.dtype, embedding.device)
        overhead = _GROUP_COST[embedding.device.type] // cache.bytes_per_token
        self.arch = arch
        self.context = sizes.context
        self.tokenizer = tokenizer
        # Even if the directory holds a known version: only a verified update has a version.
        self.version = UNSYNCED
        self.counters = Counters()
        self.scheduler = Scheduler(sizes.max_running, sizes.max_queued, LayoutPlanner(overhead))
        self.hold_admission = False  # while running completions drain before a weight swap
        self._model = Decoder(arch, weights, cache)
        self._cache = cache
        self._store = TokenStore(sizes.max_running, sizes.context, embedding.device)
        # Bounds the attention mask, [tokens, context], whatever the configured budget.
        self._prefill_tokens = min(sizes.prefill_tokens, max(64, _MASK_ENTRIES // sizes.context))
        self._batch: Batch | None = None  # None: a completion has ended or joined since it was built

    # ---- requests

    def submit(self, request: Request) -> None:
        """Queue a request. Raises GenerationError if the queue is full or its id is in use."""
        self.scheduler.submit(request)

    def abort(self, request: Request) -> None:
        """End a request now; its completions keep the tokens they have."""
        _deliver(self.scheduler.drop_waiting(request, EMPTY))
        self._finish([Ended(completion, "abort") for completion in request.running])

    def snapshot(self, request: Request) -> Snapshot | None:
        """Return the results of a request as an abort would give them now; None if it fails, for a bad log-prob."""
        # Not _retire_batch(): to build the batch again would cost every running completion time.
        lengths = self._batch.by_completion() if self._batch is not None else {}
        running = {c.index: self._read(Ended(c, "abort"), lengths.get(id(c), c.length)) for c in request.running}
        if request.failure:
            self.abort(request)
            return None
        work = self.counters.tokens + self.counters.prefilled
        return snapshot_of(request, running, work if self.scheduler.holds_back(request) else 0)

    @property
    def idle(self) -> bool:
        """True if a step has nothing to do."""
        return not self.scheduler.active and (self.hold_admission or not self.scheduler.queued)

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:  # type of the weights, type of the head
        return self._cache.keys.dtype, self._model.weights.head.dtype

    @property
    def staging_device(self) -> torch.device:
        """Device for new weights while the old ones serve: an accelerator's cache may leave no room for both."""
        return torch.device("cpu")

    @property
    def cached_tokens(self) -> int:
        """Number of positions of the KV cache in use."""
        scheduler = self.scheduler
        # Read by other threads while a step runs: take the batch once, because the step may retire it.
        batch = self._batch
        running = int(batch.lengths.sum()) if batch is not None else sum(c.length for c in scheduler.running)
        return running + sum(completion.cached for completion in scheduler.prefilling)

    # ---- weights

    @torch.inference_mode()
    def swap(self, weights: ModelWeights, version: int) -> None:
        """Replace the weights between two steps. Running completions keep their tokens and are prefilled again."""
        self.drop_cache()
        # The tokens so far belong to the old version, and must be attributed before it changes.
        for completion in self.scheduler.prefilling:
            completion.close_segment(self.version)
        if self._store.device.type == "cpu":
            self._model.weights = weights  # staged in host memory, so it can serve as it is
        else:
            self._model.weights.copy_from(weights)
        self.version = version

    def relabel(self, version: int) -> None:
        """Serve the same weights as ``version``. Cached keys and values stay: they were computed with them."""
        self._retire_batch()
        for completion in self.scheduler.active:
            completion.close_segment(self.version)
        self.version = version

    def drop_cache(self) -> None:
        """Discard all cached keys and values; the next steps compute them again."""
        # The lengths live in the batch until it is retired: suspend() sorts by length.
        self._retire_batch()
        self.scheduler.suspend()

    # ---- steps

    @torch.inference_mode()
    def step(self) -> None:
        """Admit queued completions, prefill within the budget, then sample one token for every running one."""
        started = time.perf_counter()
        if not self.hold_admission and self.scheduler.can_admit:
            self._admit()
        self._prefill()
        if self._batch is None:
            self._arrange()
        batch = self._batch
        assert batch is not None
        if batch.completions:
            self._decode(batch)
        self.counters.busy_s += time.perf_counter() - started

    def _decode(self, batch: Batch) -> None:
        store = self._store
        logits = self._model.decode(batch.ids, batch.positions, batch.groups)
        # One number per cell, drawn at admission: a token does not depend on which rows decode with it,
        # nor on whether its completion was suspended.
        uniform = store.uniforms.index_select(0, batch.cells)
        counts = batch.counts(store, self.arch.vocab)
        tokens, logprobs = sample(logits, batch.params, uniform, batch.banned(), counts)
        store.write(batch.cells, tokens, logprobs)
        self.counters.steps += 1
        self.counters.tokens += len(batch.completions)
        ended: dict[int, int | str | None] = {**batch.advance(tokens)}
        if batch.watched:
            ended |= self._stop_strings(batch, ended)
        if ended:
            # A row that ends without a match has reached its limit.
            self._finish(
                [Ended(batch.completions[row], "length" if m is None else "stop", m) for row, m in ended.items()]
            )

    def _stop_strings(self, batch: Batch, ended: dict[int, int | str | None]) -> dict[int, str]:
        """Return the rows whose completion now holds one of its stop strings: row -> string."""
        assert self.tokenizer is not None, "a request with stop strings was let in"
        # A row that reached its limit in this step (None) is included: a stop string takes precedence.
        rows = [r for r in batch.watched if ended.get(r) is None and batch.lengths[r] >= batch.ban_lengths[r]]
        if not rows:
            return {}
        strings = [batch.completions[row].request.params.stop for row in rows]
        widths = [min(window(texts), self.context) for texts in strings]
        # One copy from the device for all rows: each would otherwise wait for the device on its own.
        tails = self._store.tails(batch.cells[torch.tensor(rows, device=batch.cells.device)], max(widths))
        matches = {}
        for row, texts, width, tail in zip(rows, strings, widths, tails, strict=True):
            # Without the prompt: a stop string in it must not end the completion.
            own_tokens = min(width, int(batch.lengths[row]) - batch.completions[row].completion_start)
            match = find_stop(self.tokenizer, tail[-own_tokens:], texts)
            if match is not None:
                matches[row] = match
        return matches

    # ---- admission, prefill and rows

    def _admit(self) -> None:
        """Move completions from the queue to slots."""
        for completion in self.scheduler.admit():
            request = completion.request
            # All numbers of the completion now: they depend on (seed, index, position) only.
            numbers = uniforms(request.seed, completion.index, request.params.max_new_tokens)
            self._store.open(completion.slot, request.prompt, numbers)

    def _prefill(self) -> None:
        """Prefill the front of the line within the budget, and let completed ones run."""
        scheduler = self.scheduler
        left = self._prefill_tokens
        # Several passes: a completion that shares tokens with one of this pass copies them in the next.
        while scheduler.prefilling and left > 0:
            parts = plan_pass(scheduler.prefilling, scheduler.running, left)
            left -= self._compute(parts)
            complete = [part.completion for part in parts if part.completes]
            if complete:
                self._retire_batch()
                scheduler.join(complete)

    def _compute(self, parts: Sequence[Part]) -> int:
        """Fill free rows, or the extra row for the completion that is cut. Returns the number of tokens."""
        extra = self.scheduler.max_running
        taken = {completion.row for completion in self.scheduler.active}
        free = (row for row in range(extra) if row not in taken)
        copies = []
        for part in parts:
            completion = part.completion
            if completion.row < 0:
                # plan_pass cuts at most one completion, so one extra row is enough. It leaves the other
                # rows to completions that can decode.
                completion.row = next(free) if part.completes else extra
            if part.donor is not None:
                copies.append((part.donor.row, completion.row, part.start))
            completion.cached = part.stop
        # Before the pass: its tokens attend to the positions that are copied.
        self._cache.copy(copies)
        # A part whose positions are all copied has nothing to compute.
        todo = [part for part in parts if part.stop > part.start]
        if todo:
            self._model.prefill(PrefillBatch.build(todo, self._store))
        for part in parts:
            if part.completes and part.completion.row == extra:
                # It leaves the extra row to the next completion that is cut.
                part.completion.row = next(free)
                self._cache.copy([(extra, part.completion.row, part.stop)])
        tokens = sum(part.stop - part.start for part in todo)
        self.counters.prefilled += tokens
        return tokens

    def _arrange(self) -> None:
        """Give all running completions their rows, move their cached positions, and build the batch."""
        layout = self.scheduler.arrange()
        moves = zip(layout.sources.tolist(), layout.targets.tolist(), strict=True)
        self._cache.copy([(source, target, layout.moved_length) for source, target in moves])
        self._batch = Batch.build(self.scheduler.running, layout.groups, self._store)

    def _retire_batch(self) -> None:
        """Write the lengths of the batch back to the completions (batch-is-owner)."""
        if self._batch is not None:
            for completion, length in zip(self._batch.completions, self._batch.lengths.tolist(), strict=True):
                completion.length = length
            self._batch = None

    # ---- results

    def _finish(self, ended: Sequence[Ended]) -> None:
        if not ended:
            return
        self._retire_batch()
        # All results are read before any slot becomes free: the next step may overwrite a free slot.
        results = [(end.completion, self._read(end, end.completion.length)) for end in ended]
        _deliver(self.scheduler.finish(results))
        for request in [end.completion.request for end in ended]:
            if request.failure and not request.done.done():
                self.abort(request)

    def _read(self, end: Ended, length: int) -> Completion:
        return read_result(self._store, end.completion, length, self.version, (end.reason, end.matched))


def _deliver(requests: Sequence[Request]) -> None:
    """Complete the calls of ``requests``: their results in the order of their indices, or their failure."""
    for request in requests:
        if request.failure:
            request.done.set_exception(GenerationError(request.failure))
            continue
        request.done.set_result([request.results[index] for index in range(request.params.n)])
