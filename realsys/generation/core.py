"""The embedded engine without its thread: continuous batching, one step at a time.

    step:  admit ──> prefill or copy ──> decode all rows ──> sample ──> store ──> finish

The prefill of a prompt stops before its last token; feeding that one through ``decode`` gives the first logits. So the
cache always holds all tokens of an answer but the last, for new prompts and for interrupted answers alike, and what
follows a weight update is the same prefill over prompt and tokens so far.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from realsys.errors import GenerationError
from realsys.generation.architecture import Architecture
from realsys.generation.batch import Batch
from realsys.generation.kv_cache import KVCache
from realsys.generation.layout import LayoutPlanner
from realsys.generation.model import Decoder
from realsys.generation.protocol import UNSYNCED
from realsys.generation.sampler import sample
from realsys.generation.scheduler import Answer, AnswerResult, Request, Scheduler
from realsys.generation.token_store import TokenStore
from realsys.generation.uniforms import uniforms
from realsys.generation.weights import ModelWeights
from realsys.types import FinishReason

#: tokens of one prefill pass, padding included: bounds the memory of its activations
_PREFILL_TOKENS = 8192
#: bytes of KV cache that can be read in the time that one more group of rows costs per layer
_GROUP_COST = {"cpu": 200_000, "cuda": 64_000_000}
#: one more prefill pass costs about as much as this many padding tokens
_PREFILL_PLANNER = LayoutPlanner(overhead=128)


@dataclass(slots=True)
class Counters:
    """Since start."""

    steps: int = 0
    tokens: int = 0
    prefilled: int = 0  # prompt and answer tokens computed by prefill, padding not counted
    busy_s: float = 0.0


class EngineCore:
    """Owns model, cache, tokens and schedule. Not thread-safe: everything happens in the thread that calls ``step``."""

    def __init__(
        self, arch: Architecture, weights: ModelWeights, *, max_running: int, max_queued: int, context: int
    ) -> None:
        embedding = weights.embedding
        cache = KVCache(
            layers=arch.layers,
            rows=max_running,
            kv_heads=arch.kv_heads,
            context=context,
            head_dim=arch.head_dim,
            dtype=embedding.dtype,
            device=embedding.device,
        )
        overhead = _GROUP_COST[embedding.device.type] // cache.bytes_per_token
        self.arch, self.context = arch, context
        self.version = UNSYNCED
        self.counters = Counters()
        self.scheduler = Scheduler(max_running, max_queued, LayoutPlanner(overhead))
        self.hold_admission = False  # while running answers drain before a weight swap
        self._model = Decoder(arch, weights, cache)
        self._cache = cache
        self._store = TokenStore(max_running, context, embedding.device)
        self._batch: Batch | None = None  # None: somebody ended or joined since it was built
        self._stale = False  # the cache does not belong to the weights

    # ---- requests

    def submit(self, request: Request) -> None:
        """Queue a request. Raises GenerationError when the queue is full or its id in use."""
        self.scheduler.submit(request)

    def abort(self, request: Request) -> None:
        """End a request now; its answers keep the tokens they have."""
        nothing = AnswerResult(np.empty(0, np.int32), np.empty(0, np.float32), [], "abort")
        self._retire_batch()
        self._deliver(self.scheduler.drop_waiting(request, nothing))
        self._finish([(answer, "abort") for answer in request.running])

    @property
    def idle(self) -> bool:
        """Nothing to do in a step."""
        return not self.scheduler.running and (self.hold_admission or not self.scheduler.queued)

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
        batch = self._batch
        if batch is not None:
            return int(batch.lengths.sum())
        return sum(answer.length for answer in self.scheduler.running)

    # ---- weights

    @torch.inference_mode()
    def swap(self, weights: ModelWeights, version: int) -> None:
        """Replace the weights between two steps. The cache becomes stale; tokens so far stay as they were sampled."""
        self._retire_batch()
        for answer in self.scheduler.running:
            answer.close_segment(self.version)
        if self._store.device.type == "cpu":
            self._model.weights = weights
        else:
            self._model.weights.copy_from(weights)
        self.version = version
        self._stale = True

    def drop_cache(self) -> None:
        """Forget all cached keys and values; ``refresh`` computes them again."""
        self._stale = True

    @torch.inference_mode()
    def refresh(self) -> None:
        """Recompute the cache of all running answers if it is stale."""
        if not self._stale:
            return
        self._retire_batch()
        for answer in self.scheduler.running:
            answer.row = -1
        self._arrange()
        self._prefill([[answer] for answer in self.scheduler.running])
        self._stale = False

    # ---- steps

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, then sample one token for every running answer."""
        started = time.perf_counter()
        self.refresh()
        if not self.hold_admission and self.scheduler.can_admit:
            self._admit()
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
        tokens, logprobs = sample(logits, batch.params, uniform, batch.banned())
        store.write(batch.cells, tokens, logprobs)
        self.counters.steps += 1
        self.counters.tokens += len(batch.answers)
        ended = batch.advance(tokens)
        if ended:
            self._finish([(batch.answers[row], "stop" if hit else "length") for row, hit in ended])

    # ---- admission and rows

    def _admit(self) -> None:
        """Move answers from the queue to rows. A prompt is computed once for all answers of its request."""
        self._retire_batch()
        admitted = self.scheduler.admit()
        for answer in admitted:
            request = answer.request
            numbers = uniforms(request.seed, answer.index, request.params.max_new_tokens)
            self._store.open(answer.slot, request.prompt, numbers)
        by_request: dict[int, list[Answer]] = {}
        for answer in admitted:
            by_request.setdefault(id(answer.request), []).append(answer)
        cached = {
            key: next((a for a in answers[0].request.running if a.row >= 0), None)
            for key, answers in by_request.items()
        }
        self._arrange()
        copies: list[tuple[int, int]] = []
        prompts: list[list[Answer]] = []
        longest = 0
        for key, answers in by_request.items():
            sibling = cached[key]
            if sibling is None:
                prompts.append(answers)
                continue
            copies += [(sibling.row, answer.row) for answer in answers]
            longest = max(longest, len(sibling.request.prompt) - 1)
        if copies and longest:
            self._copy_rows(*zip(*copies, strict=True), length=longest)
        self._prefill(prompts)

    def _arrange(self) -> None:
        """Give all running answers their rows, move what is cached, and build the batch."""
        layout = self.scheduler.arrange()
        if len(layout.sources):
            self._copy_rows(layout.sources.tolist(), layout.targets.tolist(), length=layout.moved_length)
        self._batch = Batch.build(self.scheduler.running, layout.groups, self._store)

    def _retire_batch(self) -> None:
        """Write what the batch advanced back to the answers; call before anything that reads or changes them."""
        if self._batch is not None:
            for answer, length in zip(self._batch.answers, self._batch.lengths.tolist(), strict=True):
                answer.length = length
            self._batch = None

    def _copy_rows(self, sources: Sequence[int], targets: Sequence[int], *, length: int) -> None:
        device = self._store.device
        self._cache.copy(torch.tensor(sources, device=device), torch.tensor(targets, device=device), length)

    def _prefill(self, sharing: Sequence[list[Answer]]) -> None:
        """Compute the cache of the first answer of each list, up to its last token, for the rows of all of the list."""
        todo = sorted((answers for answers in sharing if answers[0].length > 1), key=lambda a: -a[0].length)
        lengths = np.asarray([answers[0].length - 1 for answers in todo], np.int64)
        device = self._store.device
        for start, stop in _PREFILL_PLANNER.split(lengths):
            width = int(lengths[start])
            step = max(1, _PREFILL_TOKENS // width)
            for first in range(start, stop, step):
                part = todo[first : min(first + step, stop)]
                owners = [i for i, answers in enumerate(part) for _ in answers]
                rows = [answer.row for answers in part for answer in answers]
                ids = self._store.padded([answers[0].slot for answers in part], width)
                self._model.prefill(ids, torch.tensor(owners, device=device), torch.tensor(rows, device=device))
        self.counters.prefilled += int(lengths.sum())

    # ---- results

    def _finish(self, ended: Sequence[tuple[Answer, FinishReason]]) -> None:
        if not ended:
            return
        self._retire_batch()
        complete = self.scheduler.finish([(answer, self._result(answer, reason)) for answer, reason in ended])
        self._deliver(complete)

    def _result(self, answer: Answer, reason: FinishReason) -> AnswerResult:
        answer.close_segment(self.version)
        tokens, logprobs = self._store.read(answer.slot, len(answer.request.prompt), answer.length)
        if not np.isfinite(logprobs).all():
            raise GenerationError(
                f"weights of version {self.version} give log-probs that are not finite "
                f"(request {answer.request.rid!r}, answer {answer.index}): the model has diverged or is corrupt"
            )
        return AnswerResult(tokens, logprobs, answer.segments, reason)

    def _deliver(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.done.set_result([request.results[index] for index in range(request.params.n)])
