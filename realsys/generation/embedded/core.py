"""The embedded engine without its thread: continuous batching, one step at a time.

    step:  admit ──> prefill what fits the budget ──> decode all running rows ──> sample ──> store ──> finish

The prefill of a prompt stops before its last token; feeding that one through ``decode`` gives the first logits. So the
cache always holds all tokens of an answer but the last, for new prompts and for interrupted answers alike, and what
follows a weight update is the same prefill over prompt and tokens so far, a budget at a time, while those that are
through decode already.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

from realsys.errors import GenerationError
from realsys.generation.backend import Completion
from realsys.generation.embedded.forward.batch import Batch, PrefillBatch
from realsys.generation.embedded.forward.kv_cache import KVCache
from realsys.generation.embedded.forward.model import Decoder
from realsys.generation.embedded.forward.sampler import sample
from realsys.generation.embedded.forward.token_store import TokenStore
from realsys.generation.embedded.forward.weights import ModelWeights
from realsys.generation.embedded.layout import LayoutPlanner
from realsys.generation.embedded.prefill import Part, plan_pass
from realsys.generation.embedded.scheduler import Answer, Request, Scheduler
from realsys.generation.protocol import UNSYNCED
from realsys.generation.stop_strings import find_stop, window
from realsys.generation.uniforms import uniforms
from realsys.hf.architecture import HfModel
from realsys.types import FinishReason

#: entries of the attention mask of a prefill pass, at most
_MASK_ENTRIES = 1 << 24
#: bytes of KV cache that can be read in the time that one more group of rows costs per layer
_GROUP_COST = {"cpu": 200_000, "cuda": 64_000_000}


@dataclass(slots=True)
class Counters:
    """Since start."""

    steps: int = 0
    tokens: int = 0
    prefilled: int = 0  # prompt and answer tokens computed by prefill, padding not counted
    busy_s: float = 0.0


class Ended(NamedTuple):
    """An answer that is over, and why. ``matched``: the stop token or stop string."""

    answer: Answer
    reason: FinishReason
    matched: int | str | None = None


class EngineCore:
    """Owns model, cache, tokens and schedule. Not thread-safe: everything happens in the thread that calls ``step``.

    ``prefill_tokens``: computed between two decoding steps, at most. ``tokenizer``: for stop strings; none without it.
    """

    def __init__(
        self,
        arch: HfModel,
        weights: ModelWeights,
        *,
        max_running: int,
        max_queued: int,
        context: int,
        prefill_tokens: int = 1024,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        embedding = weights.embedding
        cache = KVCache(
            layers=arch.layers,
            rows=max_running + 1,  # one for the answer whose prompt is computed in parts
            kv_heads=arch.kv_heads,
            context=context,
            head_dim=arch.head_dim,
            dtype=embedding.dtype,
            device=embedding.device,
        )
        overhead = _GROUP_COST[embedding.device.type] // cache.bytes_per_token
        self.arch, self.context, self.tokenizer = arch, context, tokenizer
        self.version = UNSYNCED
        self.counters = Counters()
        self.scheduler = Scheduler(max_running, max_queued, LayoutPlanner(overhead))
        self.hold_admission = False  # while running answers drain before a weight swap
        self._model = Decoder(arch, weights, cache)
        self._cache = cache
        self._store = TokenStore(max_running, context, embedding.device)
        self._prefill_tokens = min(prefill_tokens, max(64, _MASK_ENTRIES // context))
        self._batch: Batch | None = None  # None: somebody ended or joined since it was built

    # ---- requests

    def submit(self, request: Request) -> None:
        """Queue a request. Raises GenerationError when the queue is full or its id in use."""
        self.scheduler.submit(request)

    def abort(self, request: Request) -> None:
        """End a request now; its answers keep the tokens they have."""
        nothing = Completion(np.empty(0, np.int32), np.empty(0, np.float32), [], "abort")
        self._deliver(self.scheduler.drop_waiting(request, nothing))
        self._finish([Ended(answer, "abort") for answer in request.running])

    @property
    def idle(self) -> bool:
        """Nothing to do in a step."""
        return not self.scheduler.active and (self.hold_admission or not self.scheduler.queued)

    @property
    def dtype(self) -> torch.dtype:
        return self._cache.keys.dtype

    @property
    def staging_device(self) -> torch.device:
        """Where new weights are built while the old ones serve: host memory, also for an accelerator."""
        return torch.device("cpu")

    @property
    def cached_tokens(self) -> int:
        """Positions of the KV cache in use."""
        batch, scheduler = self._batch, self.scheduler
        running = int(batch.lengths.sum()) if batch is not None else sum(a.length for a in scheduler.running)
        return running + sum(answer.cached for answer in scheduler.prefilling)

    # ---- weights

    @torch.inference_mode()
    def swap(self, weights: ModelWeights, version: int) -> None:
        """Replace the weights between two steps. Running answers keep their tokens, and are prefilled again."""
        self.drop_cache()
        for answer in self.scheduler.prefilling:
            answer.close_segment(self.version)
        if self._store.device.type == "cpu":
            self._model.weights = weights
        else:
            self._model.weights.copy_from(weights)
        self.version = version

    def drop_cache(self) -> None:
        """Forget all cached keys and values; the next steps compute them again."""
        self._retire_batch()
        self.scheduler.suspend()

    # ---- steps

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, prefill within the budget, then sample one token for every running answer."""
        started = time.perf_counter()
        if not self.hold_admission and self.scheduler.can_admit:
            self._admit()
        self._prefill()
        if self._batch is None:
            self._arrange()
        batch = self._batch
        assert batch is not None
        if batch.answers:
            self._decode(batch)
        self.counters.busy_s += time.perf_counter() - started

    def _decode(self, batch: Batch) -> None:
        store = self._store
        logits = self._model.decode(batch.ids, batch.positions, batch.groups)
        uniform = store.uniforms.index_select(0, batch.cells)
        counts = batch.counts(store, self.arch.vocab)
        tokens, logprobs = sample(logits, batch.params, uniform, batch.banned(), counts)
        store.write(batch.cells, tokens, logprobs)
        self.counters.steps += 1
        self.counters.tokens += len(batch.answers)
        ended: dict[int, int | str | None] = {**batch.advance(tokens)}
        if batch.watched:
            ended |= self._stop_strings(batch, ended)
        if ended:
            self._finish([Ended(batch.answers[row], "length" if m is None else "stop", m) for row, m in ended.items()])

    def _stop_strings(self, batch: Batch, ended: dict[int, int | str | None]) -> dict[int, str]:
        """Rows whose answer holds one of its stop strings now, and which."""
        assert self.tokenizer is not None, "a request with stop strings was let in"
        rows = [r for r in batch.watched if ended.get(r) is None and batch.lengths[r] >= batch.ban_lengths[r]]
        if not rows:
            return {}
        strings = [batch.answers[row].request.params.stop for row in rows]
        widths = [min(window(texts), self.context) for texts in strings]
        tails = self._store.tails(batch.cells[torch.tensor(rows, device=batch.cells.device)], max(widths))
        found = {}
        for row, texts, width, tail in zip(rows, strings, widths, tails, strict=True):
            own = min(width, int(batch.lengths[row]) - batch.answers[row].answer_start)
            match = find_stop(self.tokenizer, tail[-own:], texts)
            if match is not None:
                found[row] = match
        return found

    # ---- admission, prefill and rows

    def _admit(self) -> None:
        """Move answers from the queue to slots."""
        for answer in self.scheduler.admit():
            request = answer.request
            numbers = uniforms(request.seed, answer.index, request.params.max_new_tokens)
            self._store.open(answer.slot, request.prompt, numbers)

    def _prefill(self) -> None:
        """Compute what fits the budget for those first in line, and let who is complete run."""
        scheduler, left = self.scheduler, self._prefill_tokens
        while scheduler.prefilling and left > 0:
            parts = plan_pass(scheduler.prefilling, scheduler.running, left)
            left -= self._compute(parts)
            complete = [part.answer for part in parts if part.completes]
            if complete:
                self._retire_batch()
                scheduler.join(complete)

    def _compute(self, parts: Sequence[Part]) -> int:
        """Fill free rows, or the extra row for the answer that is cut. Returns the number of tokens."""
        extra = self.scheduler.max_running
        taken = {answer.row for answer in self.scheduler.active}
        free = (row for row in range(extra) if row not in taken)
        copies = []
        for part in parts:
            answer = part.answer
            if answer.row < 0:
                answer.row = next(free) if part.completes else extra
            if part.donor is not None:
                copies.append((part.donor.row, answer.row, part.start))
            answer.cached = part.stop
        self._copy_rows(copies)
        todo = [part for part in parts if part.stop > part.start]
        if todo:
            self._model.prefill(PrefillBatch.build(todo, self._store))
        for part in parts:
            if part.completes and part.answer.row == extra:
                part.answer.row = next(free)
                self._copy_rows([(extra, part.answer.row, part.stop)])
        tokens = sum(part.stop - part.start for part in todo)
        self.counters.prefilled += tokens
        return tokens

    def _arrange(self) -> None:
        """Give all running answers their rows, move what is cached, and build the batch."""
        layout = self.scheduler.arrange()
        moves = zip(layout.sources.tolist(), layout.targets.tolist(), strict=True)
        self._copy_rows([(source, target, layout.moved_length) for source, target in moves])
        self._batch = Batch.build(self.scheduler.running, layout.groups, self._store)

    def _retire_batch(self) -> None:
        """Write what the batch advanced back to the answers; call before anything that reads or changes them."""
        if self._batch is not None:
            for answer, length in zip(self._batch.answers, self._batch.lengths.tolist(), strict=True):
                answer.length = length
            self._batch = None

    def _copy_rows(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy rows, all at once: (source, target, positions)."""
        if copies:
            sources, targets, lengths = zip(*copies, strict=True)
            device = self._store.device
            self._cache.copy(torch.tensor(sources, device=device), torch.tensor(targets, device=device), max(lengths))

    # ---- results

    def _finish(self, ended: Sequence[Ended]) -> None:
        if not ended:
            return
        self._retire_batch()
        complete = self.scheduler.finish([(end.answer, self._result(end)) for end in ended])
        self._deliver(complete)

    def _result(self, end: Ended) -> Completion:
        answer = end.answer
        answer.close_segment(self.version)
        tokens, logprobs = self._store.read(answer.slot, len(answer.request.prompt), answer.length)
        if not np.isfinite(logprobs).all():
            raise GenerationError(
                f"weights of version {self.version} give log-probs that are not finite "
                f"(request {answer.request.rid!r}, answer {answer.index}): the model has diverged or is corrupt"
            )
        return Completion(tokens, logprobs, answer.segments, end.reason, end.matched)

    def _deliver(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.done.set_result([request.results[index] for index in range(request.params.n)])
