"""Results of completions, read from the TokenStore: at their end, or so far."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from realsys.generation.backend import Completion, Snapshot
from realsys.generation.embedded.forward.token_store import TokenStore
from realsys.generation.embedded.scheduler import LiveCompletion, Request
from realsys.types import FinishReason

log = logging.getLogger(__name__)

#: result of a completion without a token
EMPTY = Completion(np.empty(0, np.int32), np.empty(0, np.float32), [], "abort")


def read_result(
    store: TokenStore,
    completion: LiveCompletion,
    length: int,
    version: int,
    end: tuple[FinishReason, int | str | None],
) -> Completion:
    """Read a completion whose sequence has ``length`` tokens. Tokens without a segment belong to ``version``.

    A log-prob that is not finite marks the request as failed. A check on every step would wait for the device.
    """
    request = completion.request
    tokens, logprobs = store.read(completion.slot, len(request.prompt), length)
    if not request.failure and not np.isfinite(logprobs).all():
        request.failure = (
            f"weights of version {version} give log-probs that are not finite (request {request.rid!r}, "
            f"completion {completion.index}): the model has diverged or is corrupt"
        )
        log.error("%s", request.failure)
    rest = len(tokens) - sum(count for _, count in completion.segments)
    segments = [*completion.segments, (version, rest)] if rest else list(completion.segments)
    return Completion(tokens, logprobs, segments, *end)


def snapshot_of(request: Request, running: Mapping[int, Completion], moved: int) -> Snapshot:
    """Return the state of a request. ``running``: completions that have a slot, by index."""
    indices = range(request.params.n)
    completions = [request.results.get(index) or running.get(index, EMPTY) for index in indices]
    return Snapshot(completions, frozenset(indices).difference(request.results), moved)
