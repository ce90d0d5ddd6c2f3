"""Stop strings: the text of an answer's last tokens, looked at after each step. Only answers that have some pay for it.

A string is found by decoding a few tokens, never the whole answer: every token stands for at least one byte, so the
string cannot begin further back than it has bytes. A little more is decoded because some decoders treat what they see
first in a special way (a dropped blank, half a character).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from realsys.errors import ModelError

_MARGIN = 4


def read_tokenizer(model_path: Path) -> Tokenizer | None:
    """tokenizer.json of a model directory, None if there is none. Raises ModelError if it cannot be read."""
    path = model_path / "tokenizer.json"
    if not path.exists():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # all that the tokenizers package raises
        raise ModelError(f"{path}: cannot be read as a tokenizer: {error}") from None


def window(strings: Sequence[str]) -> int:
    """Tokens at the end of an answer that are enough to find any of the strings."""
    return max(len(string.encode()) for string in strings) + _MARGIN


def find_stop(tokenizer: Tokenizer, tail: Sequence[int], strings: Sequence[str]) -> str | None:
    """The first of ``strings`` in the text of an answer's last tokens."""
    text = tokenizer.decode(list(tail), skip_special_tokens=False)
    return next((string for string in strings if string in text), None)
