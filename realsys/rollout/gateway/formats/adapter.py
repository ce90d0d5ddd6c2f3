"""The tokenizer in the form that the package ``renderers`` reads.

The parsers of ``renderers`` find the markers of a format, such as <tool_call>, by the id of a token. Many small models
have no such token: they write the marker with several tokens, or with characters. So the adapter gives a new id to
each marker that the tokenizer does not have, and puts that id where the decoded text has the marker.

    tokens of the engine      [ 8, 97, 12, 44,  5 ]   "ok" "<to" "ol_" "call>" "{"
    ids for the parser        [ 8, M+0, M+1 ]         "ok" <tool_call> "{"

These ids are for the parser only. Nothing that is trained or sent to the engine passes through here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from typing import Any

from realsys.data.tokenizer import TextTokenizer

#: first ids of markers and texts that no tokenizer has: those from _PASSING on are valid for one completion only
_OWN, _PASSING = 1 << 40, 1 << 41
#: tokens of the prompt that show whether it opens the reasoning of the completion
PROMPT_TAIL = 64


class ParserTokenizer:
    """The tokenizer of one parser. The attributes are those that ``renderers`` reads."""

    name_or_path = ""
    unk_token_id: int | None = None
    eos_token_id: int | None = None

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._markers: dict[str, int] = {}  # marker -> id
        self._own: dict[str, int] = {}  # text -> id from _OWN on
        self._passing: dict[str, int] = {}  # text -> id from _PASSING on
        self._texts: dict[int, str] = {}  # id from _OWN on -> text
        self._missing: re.Pattern[str] | None = None  # markers that the tokenizer does not have
        self._any: re.Pattern[str] | None = None  # all markers

    # ---- read by renderers

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        if tokens not in self._markers:
            known = self._tokenizer.token_id(tokens)
            self._markers[tokens] = self._own_id(tokens) if known is None else known
            self._any = _pattern(self._markers)
            self._missing = _pattern(text for text, token in self._markers.items() if token >= _OWN)
        return self._markers[tokens]

    def encode(self, text: str, *args: Any, **options: Any) -> list[int]:
        if text.startswith("<") and text.endswith(">") and text.count("<") == 1:
            return [self.convert_tokens_to_ids(text)]  # some renderers look up their markers in this way
        return self._split(text, self._any, self._own_id)

    def decode(self, ids: Any, *args: Any, **options: Any) -> str:
        texts: list[str] = []
        run: list[int] = []
        for token in ids:
            if token < _OWN:
                run.append(token)
                continue
            if run:
                texts.append(self._tokenizer.decode(run))
                run = []
            texts.append(self._texts[token])
        if run:
            texts.append(self._tokenizer.decode(run))
        return "".join(texts)

    # ---- called by Parser

    def has(self, token: int) -> bool:
        """Return True if a token of the tokenizer is a marker of the format."""
        return token in self._markers.values()

    def completion(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens of a completion for the parser. Ids of the completion before it become invalid."""
        for token in self._passing.values():
            del self._texts[token]
        self._passing.clear()
        if self._missing is None:
            return list(tokens)
        atomic = set(self._markers.values())
        ids: list[int] = []
        run: list[int] = []
        for token in tokens:
            if token in atomic:
                ids += self._run(run)
                ids.append(token)
                run = []
            else:
                run.append(token)
        return ids + self._run(run)

    def as_text(self, ids: Sequence[int], markers: Container[int]) -> list[int]:
        """Return the ids of a completion with these markers as text, which the library does not recognise."""
        return [self._passing_id(self.decode([token])) if token in markers else token for token in ids]

    def text_id(self, text: str) -> int:
        """Return an id for a text in the completion that ``completion`` was called with last."""
        return self._passing_id(text)

    def markers(self) -> frozenset[str]:
        """Return the texts of all markers of the format."""
        return frozenset(self._markers)

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        """Return the end of a prompt for the parser, cut like the headers that ``encode`` gets."""
        return self._split(self._tokenizer.decode(tokens[-PROMPT_TAIL:]), self._any, self._id)

    def _run(self, tokens: list[int]) -> list[int]:
        """Return tokens, none of which is a marker, cut where their text has one."""
        if not tokens or self._missing is None:
            return tokens
        text = self._tokenizer.decode(tokens)
        return self._split(text, self._missing, self._id) if self._missing.search(text) else tokens

    def _split(self, text: str, pattern: re.Pattern[str] | None, new_id: Callable[[str], int]) -> list[int]:
        pieces = pattern.split(text) if pattern is not None else [text]
        return [self._markers[piece] if piece in self._markers else new_id(piece) for piece in pieces if piece]

    def _own_id(self, text: str) -> int:
        if text not in self._own:
            self._own[text] = _OWN + len(self._own)
            self._texts[self._own[text]] = text
        return self._own[text]

    def _id(self, text: str) -> int:
        """Return the lasting id of a text that has one, so that it compares equal; else one for this completion."""
        return self._own[text] if text in self._own else self._passing_id(text)

    def _passing_id(self, text: str) -> int:
        if text not in self._passing:
            self._passing[text] = _PASSING + len(self._passing)
            self._texts[self._passing[text]] = text
        return self._passing[text]


def _pattern(markers: Any) -> re.Pattern[str] | None:
    """Return a pattern of the markers, with a group so that split keeps them; the longest one wins."""
    ordered = sorted(markers, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None
