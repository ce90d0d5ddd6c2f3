"""Rule for the vocabularies of several models: all must give the actor's token ids the same meaning.

Token ids are passed between models, and no text is tokenised again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from realsys.errors import MALFORMED, ConfigError, ModelError
from realsys.hf.config import read_model


def check_vocabulary(field: str, model: Path, actor: Path) -> None:
    """Check that every token id of ``actor`` is the same token in ``model``, which may have more tokens.

    ``model`` and ``actor`` are HF directories that were checked before; ``field`` is the field of ``model``. Raises
    ConfigError for an id that is missing or another token, and ModelError for a file that cannot be read.
    """
    theirs, ours = (read_model(directory, "value").vocab for directory in (model, actor))
    if theirs < ours:
        problem = f"vocab_size {theirs} is less than the actor's {ours} ({actor}): it has no embedding for some tokens"
        raise ConfigError(field, str(model), problem)
    own, other = (_read(path / "tokenizer.json") for path in (actor, model))
    if own == other:
        return
    tokens = _tokens(other, model / "tokenizer.json")
    for number, token in sorted(_tokens(own, actor / "tokenizer.json").items()):
        if (its_token := tokens.get(number)) != token:
            difference = "missing" if its_token is None else repr(its_token)
            problem = f"tokenizer differs from that of the actor ({actor}): token {number}, {token!r}, is {difference}"
            raise ConfigError(field, str(model), problem)


def _tokens(raw: bytes, path: Path) -> dict[int, str]:
    """Return id -> token of a tokenizer.json. Added tokens have a separate list and may be in the vocabulary too."""
    content = _decoded(raw, path)
    try:
        vocab = content["model"]["vocab"]
        tokens = (
            {int(number): token for token, number in vocab.items()} if isinstance(vocab, dict) else _numbered(vocab)
        )
        return tokens | {int(added["id"]): added["content"] for added in content.get("added_tokens") or ()}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelError(f"{path}: vocabulary cannot be read: {type(error).__name__}: {error}") from None


def _numbered(vocab: list[list[Any]]) -> dict[int, str]:
    """Return id -> token of a unigram model, whose entries are [token, score] in the order of the ids."""
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
