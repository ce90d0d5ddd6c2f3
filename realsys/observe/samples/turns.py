"""Texts of samples: a row is cut into turns and spans, its text into the pieces of its tokens; reference answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.data.prompts import PromptDataset
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import RealsysError
from realsys.observe.samples.filters import Turn, TurnKind

Array = npt.NDArray[Any]

CONTEXT = -1  # instead of a version: the policy did not sample the token
DIGITS = 4  # decimal digits of log-probs and advantages


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens after the prompt that one version sampled in a row; ``version`` None: context, not in the loss."""

    version: int | None
    tokens: int
    text: str


def token_versions(mask: Array, versions: Array) -> Array:
    """Return the version that sampled each token of a row, CONTEXT for a token outside the loss, int64 [T]."""
    found = np.full(len(mask), CONTEXT, np.int64)
    found[mask] = versions
    return found


def version_spans(ids: Sequence[int], versions: Array, tokenizer: TextTokenizer) -> Iterator[VersionSpan]:
    """Cut tokens where their version changes. A character of several tokens goes to the one that completes it.

    ``versions`` [len(ids)]: CONTEXT for a token that is not in the loss.
    """
    if not ids:
        return
    pieces = tokenizer.token_texts(ids)
    starts = [0, *(int(i) + 1 for i in np.flatnonzero(np.diff(versions)))]
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        version = int(versions[start])
        yield VersionSpan(None if version == CONTEXT else version, end - start, "".join(pieces[start:end]))


def token_kinds(mask: Array, masked: int) -> list[TurnKind]:
    """Return the kind of each token of a row.

    ``masked``: number of its tokens that were sampled and left the loss because they were too old. Their place is
    known if the row is one completion: they are its first tokens.
    """
    sampled = np.flatnonzero(mask)
    first = int(sampled[0]) if len(sampled) else len(mask)
    kinds: list[TurnKind] = ["sampled" if own else "context" for own in mask]
    start = first - masked if len(sampled) == len(mask) - first and 0 < masked < first else first
    kinds[start:first] = ["masked"] * (first - start)
    kinds[:start] = ["prompt"] * start
    return kinds


def turns(arrays: Mapping[str, Array], masked: int, tokenizer: TextTokenizer) -> list[Turn]:
    """Return the turns of a row with the text, version, log-prob and advantage of each token."""
    ids, mask = arrays["tokens"].tolist(), arrays["loss_mask"].astype(bool)
    kinds, pieces = token_kinds(mask, masked), tokenizer.token_texts(ids)
    place = np.cumsum(mask) - 1  # index of a token among those with loss_mask
    made: list[Turn] = []
    start = 0
    while start < len(kinds):
        end = next((i for i in range(start, len(kinds)) if kinds[i] != kinds[start]), len(kinds))
        own = place[start:end] if kinds[start] == "sampled" else place[:0]
        made.append(
            Turn(
                kinds[start],
                pieces[start:end],
                _of(arrays.get("versions"), own),
                _of(arrays.get("behav_logprobs"), own),
                _of(arrays.get("advantages"), own),
            )
        )
        start = end
    return made


def _of(array: Array | None, places: Array) -> list[Any]:
    """Return the values of some loss tokens as JSON has them: one number if all are equal, [] without any."""
    if array is None or not len(array) or not len(places):
        return []
    values = array[places]
    values = values[:1] if (values == values[0]).all() else values
    rounded = values if values.dtype.kind == "i" else np.round(values.astype(np.float64), DIGITS)
    return list(rounded.tolist())


# ---- reference answers of the prompts of a trial, from its data set as it is on disk now


class References:
    """Data set of one configuration. It is opened for the first reference, which reads all of its lines once."""

    def __init__(self, config: Config, paths: TrialPaths, tokenizer: TextTokenizer) -> None:
        self._config = config
        self._paths = paths
        self._tokenizer = tokenizer
        self._prompts: PromptDataset | None = None
        self._problem = ""

    def find(self, split: str, index: int) -> tuple[str | None, str]:
        """Return the reference answer, or None and the reason. A data set that cannot be opened is tried once."""
        if self._prompts is None and not self._problem:
            try:
                self._prompts = PromptDataset(self._config, self._paths, self._tokenizer)
            except (RealsysError, OSError) as error:
                self._problem = str(error)
        if self._prompts is None:
            return None, self._problem
        try:
            return self._prompts.prompt(split, index).answer, ""
        except (RealsysError, OSError, LookupError) as error:
            return None, str(error)
