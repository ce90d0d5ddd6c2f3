"""Text of a completion while its tokens arrive, as far as no later token can take it back. Pure.

    tokens ──> text ──> shown: reasoning or content
                 │ held back: half a character, white space at the end, what may begin a marker or a stop string
                 ├─ a marker of reasoning: the parser reads all tokens again, and says where the text goes on
                 └─ another marker, such as that of a tool call, or a stop string: the reply has the rest

Rules
beginning    What is shown begins the reasoning and the content that ``read_choice`` returns for the whole completion.
bounded      The parser reads a completion at most ``MOST_READS`` times; after that nothing more is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from realsys.data.tokenizer import TextTokenizer
from realsys.rollout.gateway.formats.marks import OPEN_END
from realsys.rollout.gateway.wire.base import Call

if TYPE_CHECKING:  # it imports renderers, which takes half a second
    from realsys.rollout.gateway.formats.parser import Parser

MOST_READS = 32
_UNKNOWN = "\ufffd"  # in the text of a part of a character
_LONGEST_CHARACTER = 4  # tokens


class StreamedChoice:
    """One completion in progress. ``reasoning`` and ``text`` only grow."""

    def __init__(self, tokenizer: TextTokenizer, parser: Parser, call: Call, prompt: Sequence[int]) -> None:
        self.reasoning = ""
        self.text = ""
        self._tokenizer = tokenizer
        self._parser = parser
        self._call = call
        self._prompt = prompt
        self._tools = call.tools if call.parse_tools else ()
        self._thoughts, ends = parser.markers() if call.kind == "chat" else (frozenset[str](), frozenset[str]())
        self._has_format = bool(self._thoughts or ends)
        self._ends = (*ends, *call.stop)
        #: all beginnings of what must not be shown
        self._beginnings = {text[:k] for text in (*self._thoughts, *self._ends) for k in range(1, len(text))}
        self._longest = max(map(len, self._beginnings), default=0)
        self._tokens: list[int] = []
        self._window, self._decoded = 0, 0  # tokens from the first on are decoded together; so many are decoded
        self._pending = ""  # text of the channel that is not shown
        self._channel = "text"  # attribute that the next text belongs to
        self._reads = 0
        self._held = False

    def add(self, tokens: Sequence[int]) -> None:
        """Add the next tokens."""
        if self._held:
            return
        self._tokens += tokens
        self._pending += self._new_text()
        is_first = not getattr(self, self._channel) and self._pending[: self._visible()].strip()
        # The parser knows how white space at the beginning of a channel is shown.
        if (is_first and self._has_format) or any(marker in self._pending for marker in self._thoughts):
            self._read()
        if not self._held:
            self._show()

    def _new_text(self) -> str:
        """Return the text that is complete since the last call; the end of text is not a part of it."""
        count = len(self._tokens)
        if self._tokens[-1] in self._tokenizer.eos_token_ids:
            count -= 1
        # Two pieces are decoded together, because some decoders treat the first token in a special way.
        before = self._tokenizer.decode(self._tokens[self._window : self._decoded])
        for end in range(count, max(self._decoded, count - _LONGEST_CHARACTER), -1):
            text = self._tokenizer.decode(self._tokens[self._window : end])
            # Bytes that are no character at all are as many as the tokens of the longest one.
            if not text.endswith(_UNKNOWN) or end == count - _LONGEST_CHARACTER + 1:
                self._window, self._decoded = self._decoded, end
                return text[len(before) :]
        return ""

    def _visible(self) -> int:
        """Return how much of the pending text no later token can change."""
        text = self._pending
        ends = [place for end in self._ends if (place := text.find(end)) >= 0]
        text = text[: min(ends, default=len(text))]
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                text = text[:-length]
                break
        return len(text.rstrip())

    def _show(self) -> None:
        visible = self._visible()
        shown = getattr(self, self._channel) + self._pending[:visible]
        setattr(self, self._channel, shown)
        self._pending = self._pending[visible:]
        self._held = any(end in self._pending for end in self._ends)

    def _read(self) -> None:
        """Let the parser read all tokens, and show what is complete."""
        self._reads += 1
        tokens = self._tokens[: self._decoded]
        parsed = self._parser.parse(tokens, self._tools, self._prompt, self._call.options, open_end=True)
        found = {"reasoning": parsed.reasoning or "", "text": parsed.content}
        reasoning, text = (text.removesuffix(OPEN_END) for text in found.values())
        self._channel = "reasoning" if found["reasoning"] != reasoning else "text"
        self._held = (
            self._reads > MOST_READS
            or bool(parsed.calls or parsed.malformed)
            or not self._parser.shows(text, self._tools)
            or not found[self._channel].endswith(OPEN_END)
            or not (reasoning.startswith(self.reasoning) and text.startswith(self.text))
            or bool(self.text and reasoning != self.reasoning)  # replies have the reasoning before the content
        )
        if self._held:
            return
        if self._channel == "reasoning":
            self._pending = reasoning[len(self.reasoning) :]
        else:
            self.reasoning = reasoning
            self._pending = text[len(self.text) :]
