"""Bytes of single tokens, and the number of tokens."""

from __future__ import annotations

import re
from functools import cached_property

from realsys.data.tokenizer import TextTokenizer
from realsys.hf.config import read_vocabulary

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNKNOWN = "\ufffd"


def _byte_alphabet() -> dict[str, int]:
    """Return the characters by which byte-level vocabularies write bytes: printable ones as themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class Vocabulary:
    """Bytes of the tokens of one tokenizer (``wire.base.Vocabulary``). They are computed once for each token."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._alphabet = _byte_alphabet()
        self._bytes: dict[int, bytes] = {}

    @cached_property
    def size(self) -> int:
        """Every token id is below this. A model may have more tokens than its tokenizer."""
        return read_vocabulary(self._tokenizer.path) or self._tokenizer.vocab_size

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text. A token may be a part of a character."""
        if token not in self._bytes:
            self._bytes[token] = self._find(token)
        return self._bytes[token]

    def _find(self, token: int) -> bytes:
        text = self._tokenizer.decode([token])
        written = self._tokenizer.token(token) or ""
        if _UNKNOWN not in text:
            # A decoder may strip the space that begins a text.
            return (" " * (written.startswith("▁") and not text.startswith(" ")) + text).encode()
        if byte := _BYTE.fullmatch(written):
            return bytes([int(byte[1], 16)])
        if all(character in self._alphabet for character in written):
            return bytes(self._alphabet[character] for character in written)
        return text.encode()
