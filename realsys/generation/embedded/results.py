"""Results of completions, read from the TokenStore: at their end, or so far; and ends by a stop string."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch
from tokenizers import Tokenizer

from realsys.generation.backend import Completion, Snapshot
from realsys.generation.embedded.forward.batch import Batch
from realsys.generation.embedded.forward.token_store import TokenStore
from realsys.generation.embedded.scheduler import LiveCompletion, Request
from realsys.generation.stop_strings import find_stop, window
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
    runs = completion.runs(version, len(tokens))
    segments = [(sampled_by, count) for sampled_by, _, count in runs]
    oldest_keys = [(kv_version, count) for _, kv_version, count in runs]
    top = completion.top[: len(tokens)] if request.params.top_logprobs_num else None
    return Completion(tokens, logprobs, segments, *end, None if oldest_keys == segments else oldest_keys, top)


def stopped_rows(
    batch: Batch, ended: Mapping[int, int | str | None], store: TokenStore, tokenizer: Tokenizer
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


def snapshot_of(request: Request, running: Mapping[int, Completion], moved: int) -> Snapshot:
    """Return the state of a request. ``running``: completions that have a slot, by index."""
    indices = range(request.params.n)
    completions = [request.results.get(index) or running.get(index, EMPTY) for index in indices]
    return Snapshot(completions, frozenset(indices).difference(request.results), moved)
