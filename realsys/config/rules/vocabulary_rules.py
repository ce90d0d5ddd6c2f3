"""Whether a model reads in the actor's token ids what the actor wrote: ids travel, and nothing is tokenised again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from realsys.errors import MALFORMED, ConfigError, ModelError
from realsys.hf.config import read_model


def check_vocabulary(field: str, model: Path, actor: Path) -> None:
    """``model`` and ``actor``: HF directories that have been checked one by one; ``field`` names the former.

    ``model`` may know more tokens. Raises ConfigError for an id that is missing there, or another token; ModelError for
    a file that cannot be read.
    """
    theirs, ours = (read_model(directory, "value").vocab for directory in (model, actor))
    if theirs < ours:
        problem = f"vocab_size {theirs} is less than the actor's {ours} ({actor}): it has no embedding for some tokens"
        raise ConfigError(field, str(model), problem)
    own, other = (_read(path / "tokenizer.json") for path in (actor, model))
    if own == other:
        return
    found = _tokens(other, model / "tokenizer.json")
    for number, token in sorted(_tokens(own, actor / "tokenizer.json").items()):
        if (there := found.get(number)) != token:
            what = "not there" if there is None else f"{there!r} there"
            problem = f"has another tokenizer than the actor ({actor}): token {number}, {token!r}, is {what}"
            raise ConfigError(field, str(model), problem)


def _tokens(raw: bytes, path: Path) -> dict[int, str]:
    """Id -> token, of a tokenizer.json. Added tokens stand in their own list, and may be in the vocabulary as well."""
    content = _decoded(raw, path)
    try:
        vocab = content["model"]["vocab"]
        found = {int(number): token for token, number in vocab.items()} if isinstance(vocab, dict) else _numbered(vocab)
        return found | {int(added["id"]): added["content"] for added in content.get("added_tokens") or ()}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelError(f"{path}: no vocabulary in it that can be read: {type(error).__name__}: {error}") from None


def _numbered(vocab: list[list[Any]]) -> dict[int, str]:
    """Of a unigram model: [token, score], in the order of the ids."""
    return {number: entry[0] for number, entry in enumerate(vocab)}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def _decoded(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except MALFORMED as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
