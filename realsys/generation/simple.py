"""Base of engines that are one function: a thread completes prompts and loads weights, one after another. No torch.

    HTTP handlers ──commands──> [mailbox] ──> engine thread: all commands, one completion, repeat

It waits for a command, or for a request while it is not paused. A command runs between two completions, so each
completion is of one weight version.
"""

from __future__ import annotations

import logging
import secrets
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from realsys.config.backend_rules import DEFAULT_CAPACITY
from realsys.config.trial_sizes import longest_sequence
from realsys.errors import GenerationError, RealsysError, ServerBusy
from realsys.generation.backend import Change, Completion, EngineParts, Snapshot
from realsys.generation.limits import Limits
from realsys.generation.protocol import UNSYNCED, SamplingParams, ServerInfo, UpdateResult
from realsys.generation.stop_strings import find_stop, read_tokenizer, window
from realsys.generation.threaded import ThreadedEngine
from realsys.generation.uniforms import completion_seed
from realsys.model_files.config_json import read_model
from realsys.observe.spans import Phases, now, span
from realsys.types import FinishReason

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


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

    def generate(self, rid: str, input_ids: Sequence[int], params: SamplingParams) -> Future[list[Completion]]:
        """Queue a request and return the future of its completions.

        Raises GenerationError for a bad request; the future raises one for a full queue.
        """
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
            paused=self._paused,
            busy_s=self._busy_s,
        )

    # ---- engine thread

    def _has_work(self) -> bool:
        return bool(self._queue) and not self._paused

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
        return Completion(
            np.asarray(tokens[:length], np.int32),
            np.asarray(logprobs[:length], np.float32),
            [(self._version, length)],
            reason,
            matched,
        )

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

    def _snapshot(self, rid: str) -> Snapshot | None:
        request = next((queued for queued in self._queue if queued.rid == rid), None)
        if request is None:
            return None
        waiting = frozenset(range(len(request.results), request.params.n))
        return Snapshot(request.results + [_empty() for _ in waiting], waiting, self._completions)

    def _end_requests(self, rid: str | None) -> bool:
        """End one request, or all, with the completions they have; the missing ones are empty."""
        ended = [request for request in self._queue if rid is None or request.rid == rid]
        for request in ended:
            self._queue.remove(request)
            self._queued -= request.waiting
            request.done.set_result(request.results + [_empty() for _ in range(request.waiting)])
        return bool(ended)

    def _update(self, path: str, version: int, abort_all: bool) -> UpdateResult:
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
        self._updates += 1
        timings = {name: float(seconds) for name, seconds in staged.timings.items()}
        timings |= {"stage_s": loading - start, "pause_s": loaded - start, "load_s": loaded - loading}
        return UpdateResult(True, f"serving version {version}", timings, dict(staged.counts))


def _empty() -> Completion:
    """Return the result of a completion that has not begun."""
    return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), [], "abort")
