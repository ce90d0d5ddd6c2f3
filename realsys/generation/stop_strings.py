"""Stop strings: a search in the text of a completion's last tokens after each step, if its request has any.

The search decodes a few tokens, never the whole completion. Every token is at least one byte, so a string of b bytes
is within the last b tokens. A few more are decoded, because some decoders treat the first token in a special way: they
drop a blank, or show half a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from realsys.errors import ModelError

_MARGIN = 4


def read_tokenizer(model_path: Path) -> Tokenizer | None:
    """Read tokenizer.json of a model directory; None if the file does not exist.

    Raises ModelError if it cannot be read.
    """
    path = model_path / "tokenizer.json"
    if not path.exists():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers package raises plain Exception
        raise ModelError(f"{path}: cannot be read as a tokenizer: {error}") from None


def window(strings: Sequence[str]) -> int:
    """Return how many tokens at the end of a completion suffice to find any of the strings."""
    return max(len(string.encode()) for string in strings) + _MARGIN


def find_stop(tokenizer: Tokenizer, tail: Sequence[int], strings: Sequence[str]) -> str | None:
    """Return the first of ``strings`` that is in the text of a completion's last tokens, or None."""
    text = tokenizer.decode(list(tail), skip_special_tokens=False)
    return next((string for string in strings if string in text), None)
