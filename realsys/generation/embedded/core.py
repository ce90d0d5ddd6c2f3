"""The embedded engine without its thread: continuous batching, one step at a time.

    step:  admit ──> prefill within the budget ──> decode all running rows ──> sample ──> store ──> finish

The prefill of a prompt stops before its last token; feeding that one through ``decode`` gives the first logits.

Invariants
    last-uncached   The cache holds all tokens of a completion but the last, for new prompts and for interrupted
                    completions alike. Recovery from a weight update is therefore the same prefill, over prompt and
                    tokens so far, a budget at a time; completions that are through it decode already.
    batch-is-owner  While a batch exists, it alone knows the lengths of the running completions. ``_retire_batch``
                    writes them back; it must run before anything reads or changes a running completion.
    one-version     A token belongs to the version whose weights computed its logits. Unless KvPolicy.keep is set, they
                    have computed all cached keys and values that it read: ``swap`` drops the cache of everything.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

from realsys.errors import GenerationError
from realsys.generation.backend import RequestSnapshot
from realsys.generation.completion import EMPTY, Completion
from realsys.generation.embedded.batch import DecodeBatch, PrefillBatch, TokenStore
from realsys.generation.embedded.decoder import CacheShape, Decoder, KVCache, ModelWeights
from realsys.generation.embedded.prefix_cache import CacheRows, KvPolicy, PrefillPart, plan_pass
from realsys.generation.embedded.sampler import sample, top_logprobs
from realsys.generation.embedded.scheduler import LayoutPlanner, LiveCompletion, Request, Scheduler
from realsys.generation.protocol import UNSYNCED
from realsys.generation.sampling_rules import find_stop, uniforms, window
from realsys.model_files.architecture import HfModel
from realsys.types import FinishReason

log = logging.getLogger(__name__)

#: upper bound on the entries of the attention mask of a prefill pass
_MASK_ENTRIES = 1 << 24
#: result of a completion without a token
#: bytes of KV cache that can be read in the time that one more group of rows costs per layer
_GROUP_COST = {"cpu": 200_000, "cuda": 64_000_000}


PREFILL_TOKENS = 1024  # a prompt of this length takes about as long as some decoding steps of all sequences


@dataclass(frozen=True, slots=True)
class CoreSizes:
    """Sizes of an EngineCore.

    max_running     completions that decode together
    max_queued      completions that wait
    context         tokens of the longest sequence, prompt and completion
    prefill_tokens  upper bound on the tokens computed between two decoding steps
    cache_rows      rows of the cache besides those of the completions that decode: for ended ones
    """

    max_running: int
    max_queued: int
    context: int
    prefill_tokens: int = PREFILL_TOKENS
    cache_rows: int = 0

    @property
    def rows(self) -> int:
        """Rows for whole sequences."""
        return self.max_running + self.cache_rows


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    tokens: int = 0
    prefilled: int = 0  # prompt and completion tokens computed by prefill, without padding
    reused: int = 0  # those for which it found keys in the cache
    busy_s: float = 0.0


class EndedCompletion(NamedTuple):
    """A completion that has ended, and why. ``matched``: the stop token or stop string."""

    completion: LiveCompletion
    reason: FinishReason
    matched: int | str | None = None


class EngineCore:
    """Owner of model, cache, tokens and schedule. Not thread-safe: one thread makes all calls.

    ``tokenizer`` serves stop strings; None if the model directory has none. ``kv``: None: the default policy.
    """

    def __init__(
        self,
        arch: HfModel,
        weights: ModelWeights,
        sizes: CoreSizes,
        tokenizer: Tokenizer | None = None,
        kv: KvPolicy | None = None,
    ) -> None:
        embedding = weights.embedding
        shape = CacheShape(
            layers=arch.layers,
            rows=sizes.rows + 1,  # the last one is for the prompt that is computed in parts
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
        self.rows = CacheRows(sizes.rows)
        self.hold_admission = False  # while running completions drain before a weight swap
        self._sizes = sizes
        self._kv = kv or KvPolicy()
        self._model = Decoder(arch, weights, cache)
        self._cache = cache
        self._store = TokenStore(sizes.max_running, sizes.context, embedding.device)
        # Bounds the attention mask, [tokens, context], whatever the configured budget.
        self._prefill_tokens = min(sizes.prefill_tokens, max(64, _MASK_ENTRIES // sizes.context))
        self._batch: DecodeBatch | None = None  # None: a completion has ended or joined since it was built

    # ---- requests

    def submit(self, request: Request) -> None:
        """Queue a request. Raises GenerationError if the queue is full or its id is in use."""
        self.scheduler.submit(request)

    def abort(self, request: Request) -> None:
        """End a request now; its completions keep the tokens they have."""
        _deliver(self.scheduler.drop_waiting(request, EMPTY))
        self._finish([EndedCompletion(completion, "abort") for completion in request.running])

    def snapshot(self, request: Request) -> RequestSnapshot | None:
        """Return the results of a request as an abort would give them now; None if it fails, for a bad log-prob."""
        # Not _retire_batch(): to build the batch again would cost every running completion time.
        # Not for a request that waits: the snapshots of a queue of streams would cost each step time, too.
        lengths = self._batch.by_completion() if self._batch is not None and request.running else {}
        running = {
            c.index: self._read(EndedCompletion(c, "abort"), lengths.get(id(c), c.length)) for c in request.running
        }
        if request.failure:
            self.abort(request)
            return None
        work = self.counters.tokens + self.counters.prefilled
        indices = range(request.params.n)
        completions = [request.results.get(index) or running.get(index, EMPTY) for index in indices]
        moved = work if self.scheduler.holds_back(request) else 0
        return RequestSnapshot(completions, frozenset(indices).difference(request.results), moved)

    @property
    def idle(self) -> bool:
        """True if a step has nothing to do."""
        return not self.scheduler.active and (self.hold_admission or not self.scheduler.queued)

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:  # type of the weights, type of the head
        return self._cache.keys.dtype, self._model.weights.head.dtype

    @property
    def device(self) -> torch.device:
        return self._store.device

    def twin(self, weights: ModelWeights, version: int) -> EngineCore:
        """Return an idle core like this one, with other weights and a cache of its own."""
        twin = EngineCore(self.arch, weights, self._sizes, self.tokenizer, self._kv)
        twin.version = version
        return twin

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
        if self._kv.outlives(self.version, version):
            self._close_segments()
        else:
            self.drop_cache()
        if self._store.device.type == "cpu":
            self._model.weights = weights  # staged in host memory, so it can serve as it is
        else:
            self._model.weights.copy_from(weights)
        self.version = version
        self.rows.forget(self._kv.oldest(version))

    def relabel(self, version: int) -> None:
        """Serve the same weights as ``version``. Cached keys and values stay: they were computed with them."""
        if self._kv.keep and version < self.version:
            self.drop_cache()  # a stamp of older weights could be above the new number
        self._close_segments()
        for completion in self.scheduler.active:
            if completion.kv_version == self.version:
                completion.kv_version = version
        self.rows.relabel(self.version, version)
        self.version = version
        self.rows.forget(self._kv.oldest(version))

    @torch.inference_mode()
    def release(self) -> None:
        """Give the memory of weights and cache back to the device. Requests keep their tokens, and lose their keys."""
        self.drop_cache()
        self.version = UNSYNCED
        if self._store.device.type == "cpu":
            self._model.weights = ModelWeights.none()  # staged weights replace them, and packed ones have no storage
        for tensor in self._model.weights.tensors():
            tensor.untyped_storage().resize_(0)
        self._cache.release()
        if self._store.device.type == "cuda":
            torch.cuda.empty_cache()  # else torch's allocator keeps it for this process

    @torch.inference_mode()
    def allocate(self) -> None:
        """Take that memory again. ``swap`` fills the weights."""
        for tensor in self._model.weights.tensors():
            tensor.untyped_storage().resize_(tensor.nbytes)
        self._cache.allocate()

    def drop_cache(self) -> None:
        """Discard all cached keys and values; the next steps compute them again."""
        # The lengths live in the batch until segments are closed: suspend() sorts by length.
        self._close_segments()
        self.scheduler.suspend()
        self.rows.forget()

    def _close_segments(self) -> None:
        """Attribute the tokens so far to the version, before it or the keys change."""
        self._retire_batch()
        for completion in self.scheduler.active:
            completion.close_segment(self.version)

    # ---- steps

    @torch.inference_mode()
    def step(self) -> None:
        """Admit queued completions, prefill within the budget, then sample one token for every running one."""
        started = time.perf_counter()
        if not self.hold_admission and self.scheduler.can_admit:
            for completion in self.scheduler.admit():
                request = completion.request
                # All numbers of the completion now: they depend on (seed, index, position) only.
                numbers = uniforms(request.seed, completion.index, request.params.max_new_tokens)
                self._store.open(completion.slot, request.prompt, numbers)
        self._prefill()
        if self._batch is None:
            self._arrange()
        batch = self._batch
        assert batch is not None
        if batch.completions:
            self._decode(batch)
        self.counters.busy_s += time.perf_counter() - started

    def _decode(self, batch: DecodeBatch) -> None:
        store = self._store
        logits = self._model.decode(batch.ids, batch.positions, batch.groups)
        # One number per cell, drawn at admission: a token does not depend on which rows decode with it,
        # nor on whether its completion was suspended.
        uniform = store.uniforms.index_select(0, batch.cells)
        counts = batch.counts(store, self.arch.vocab)
        for row, best in top_logprobs(logits, batch.params).items():  # before ``sample``, which changes the logits
            batch.completions[row].top.append(best)
        tokens, logprobs = sample(logits, batch.params, uniform, batch.banned(), counts)
        store.write(batch.cells, tokens, logprobs)
        self.counters.steps += 1
        self.counters.tokens += len(batch.completions)
        ended: dict[int, int | str | None] = {**batch.advance(tokens)}
        if batch.watched:
            assert self.tokenizer is not None, "a request with stop strings was let in"
            ended |= _stopped_rows(batch, ended, store, self.tokenizer)
        if ended:
            # A row that ends without a match has reached its limit.
            self._finish(
                [
                    EndedCompletion(batch.completions[row], "length" if m is None else "stop", m)
                    for row, m in ended.items()
                ]
            )

    # ---- admission, prefill and rows

    def _prefill(self) -> None:
        """Prefill the front of the line within the budget, and let completed ones run."""
        scheduler = self.scheduler
        left = self._prefill_tokens
        # Several passes: a completion that shares tokens with one of this pass copies them in the next.
        while scheduler.prefilling and left > 0:
            parts = plan_pass(scheduler.prefilling, self._donors(), left, self.rows.index)
            left -= self._compute(parts)
            complete = [part.completion for part in parts if part.completes]
            if complete:
                self._retire_batch()
                scheduler.join(complete)

    def _donors(self) -> list[LiveCompletion]:
        """Return the running completions whose keys are new enough for others."""
        oldest = self._kv.oldest(self.version)
        return [completion for completion in self.scheduler.running if completion.kv_version >= oldest]

    def _compute(self, parts: Sequence[PrefillPart]) -> int:
        """Fill the rows of a pass. Returns the number of tokens."""
        scheduler = self.scheduler
        self.counters.reused += sum(part.start - part.completion.cached for part in parts)
        self.rows.evicted.count(parts, self.counters.prefilled, self.rows.extra)
        # Before the pass: its tokens attend to the positions that are copied.
        self._cache.copy(self.rows.assign(parts, scheduler.active, self.version))
        # A part whose positions are all copied has nothing to compute.
        todo = [part for part in parts if part.stop > part.start]
        if todo:
            self._model.prefill(PrefillBatch.build(todo, self._store))
        self._cache.copy(self.rows.leave_extra(parts, scheduler.active))
        tokens = sum(part.stop - part.start for part in todo)
        self.counters.prefilled += tokens
        return tokens

    def _arrange(self) -> None:
        """Give all running completions their rows, move their cached positions, and build the batch."""
        scheduler = self.scheduler
        layout = scheduler.arrange()
        moves = zip(layout.sources.tolist(), layout.targets.tolist(), strict=True)
        others = self.rows.make_room(len(scheduler.running), scheduler.prefilling)
        self._cache.copy([(source, target, layout.moved_length) for source, target in moves] + others)
        self._batch = DecodeBatch.build(self.scheduler.running, layout.groups, self._store)

    def _retire_batch(self) -> None:
        """Write the lengths of the batch back to the completions (batch-is-owner)."""
        if self._batch is not None:
            for completion, length in zip(self._batch.completions, self._batch.lengths.tolist(), strict=True):
                completion.length = length
            self._batch = None

    # ---- results

    def _finish(self, ended: Sequence[EndedCompletion]) -> None:
        if not ended:
            return
        self._retire_batch()
        # All results are read before any slot becomes free: the next step may overwrite a free slot.
        results = [(end.completion, self._read(end, end.completion.length)) for end in ended]
        for completion, result in results:
            cached = completion.cached if completion in self.scheduler.prefilling else completion.length - 1
            # Not without a finite log-prob: its keys might not be finite either.
            usable = self._kv.retain and completion.kv_version >= self._kv.oldest(self.version)
            if usable and not completion.request.failure:
                self.rows.retain(completion, result.tokens, cached)
        _deliver(self.scheduler.finish(results))
        for request in [end.completion.request for end in ended]:
            if request.failure and not request.done.done():
                self.abort(request)

    def _read(self, end: EndedCompletion, length: int) -> Completion:
        """Read a completion whose sequence has ``length`` tokens; those without a segment belong to ``self.version``.

        A log-prob that is not finite marks the request as failed. A check on every step would wait for the device.
        """
        completion, request = end.completion, end.completion.request
        tokens, logprobs = self._store.read(completion.slot, len(request.prompt), length)
        if not request.failure and not np.isfinite(logprobs).all():
            request.failure = (
                f"weights of version {self.version} give log-probs that are not finite (request {request.rid!r}, "
                f"completion {completion.index}): the model has diverged or is corrupt"
            )
            log.error("%s", request.failure)
        runs = completion.runs(self.version, len(tokens))
        return Completion.of(
            tokens,
            logprobs,
            [(sampled_by, count) for sampled_by, _, count in runs],
            end.reason,
            kv_versions=[(kv_version, count) for _, kv_version, count in runs],
            top=completion.top[: len(tokens)] if request.params.top_logprobs_num else None,
            matched=end.matched,
        )


def _stopped_rows(
    batch: DecodeBatch, ended: Mapping[int, int | str | None], store: TokenStore, tokenizer: Tokenizer
) -> dict[int, str]:
    """Return the rows whose completion now holds one of its stop strings: row -> string. ``ended``: as of the step."""
    # A row that reached its limit in this step (None) is included: a stop string takes precedence.
    rows = [r for r in batch.watched if ended.get(r) is None and batch.lengths[r] >= batch.ban_lengths[r]]
    if not rows:
        return {}
    strings = [batch.completions[row].request.params.stop for row in rows]
    widths = [min(window(texts), store.context) for texts in strings]
    # One copy from the device for all rows: each would otherwise wait for the device on its own.
    tails = store.tails(batch.cells[torch.tensor(rows, device=batch.cells.device)], max(widths))
    matches = {}
    for row, texts, width, tail in zip(rows, strings, widths, tails, strict=True):
        # Without the prompt: a stop string in it must not end the completion.
        own_tokens = min(width, int(batch.lengths[row]) - batch.completions[row].completion_start)
        match = find_stop(tokenizer, tail[-own_tokens:], texts)
        if match is not None:
            matches[row] = match
    return matches


def _deliver(requests: Sequence[Request]) -> None:
    """Complete the calls of ``requests``: their results in the order of their indices, or their failure."""
    for request in requests:
        if request.failure:
            request.done.set_exception(GenerationError(request.failure))
            continue
        request.done.set_result([request.results[index] for index in range(request.params.n)])
