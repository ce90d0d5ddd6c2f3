"""A completion of the engine as the client reads it: text, reasoning, tool calls, reason of its end.

Before its end, ``StreamedChoice`` reads the part that may be shown; ``Vocabulary`` has the bytes of single tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from realsys.data.tokenizer import TextTokenizer
from realsys.generation.completion import Completion
from realsys.model_files.config_json import read_vocabulary
from realsys.rollout.gateway.dialect import Choice, ChoiceEnd, GatewayCall, call_id

if TYPE_CHECKING:
    from realsys.rollout.gateway.parser import Parser


def read_choice(
    tokenizer: TextTokenizer,
    parser: Parser,
    call: GatewayCall,
    prompt: Sequence[int],
    completion: Completion,
    name: str,
) -> Choice:
    """Read one completion.

    ``name`` is unique to the completion: the ids of its tool calls are made of it. A repeated call with the same
    name and completion gets an equal choice.
    """
    end: ChoiceEnd = "length" if completion.finish_reason != "stop" else "stop"
    tokens = completion.tokens.tolist()
    if call.kind != "chat":
        text, stop = _cut(tokenizer.completion_text(tokens), call.stop if end == "stop" else ())
        return Choice(completion, text, finish_reason=end, stop=stop)
    parsed = parser.parse(tokens, call.tools if call.parse_tools else (), prompt, call.options)
    choice = Choice(completion, parsed.content, parsed.reasoning, finish_reason=end, malformed=parsed.malformed)
    if end == "stop" and call.stop:
        _cut_choice(choice, call.stop)
    choice.tool_calls = _tool_calls(parsed.calls, name)
    if choice.tool_calls:
        choice.finish_reason = "tool_calls"
    return choice


def opens_reasoning(tokenizer: TextTokenizer, prompt: Sequence[int]) -> bool:
    """Return True if the prompt ends inside of the reasoning of its completion."""
    return tokenizer.decode(prompt[-_PROMPT_END:]).rstrip().endswith("<think>")


def _tool_calls(calls: list[tuple[str | None, str, dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    """Return the tool calls in chat form. An id that the model wrote stays, because its tool results name it."""
    result: list[dict[str, Any]] = []
    used: set[str] = set()
    for index, (own, function, arguments) in enumerate(calls):
        number = own if own and own not in used else call_id(name, index)
        used.add(number)
        text = msgspec.json.encode(arguments).decode()
        result.append({"id": number, "type": "function", "function": {"name": function, "arguments": text}})
    return result


def _cut_choice(choice: Choice, stops: Sequence[str]) -> None:
    """Cut the stop string, which is in the content, or in the reasoning if the completion ended there."""
    if not choice.text and choice.reasoning:
        choice.reasoning, choice.stop = _cut(choice.reasoning, stops)
    else:
        choice.text, choice.stop = _cut(choice.text, stops)


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the first stop string, and that string; the whole text and None if it has none."""
    places = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    if not places:
        return text, None
    place, stop = min(places)
    return text[:place], stop


# ---- text of a completion while its tokens arrive, as far as no later token can take it back. Pure
#
#     tokens ──> text ──> shown: reasoning or content
#                  │ held back: half a character, white space at the end, what may begin a marker or a stop string
#                  ├─ a marker of reasoning: the parser reads all tokens again, and says where the text goes on
#                  └─ another marker, such as that of a tool call, or a stop string: the reply has the rest
#
# beginning  What is shown begins the reasoning and the content that ``read_choice`` returns for the whole completion.
# bounded    The parser reads a completion at most ``MOST_READS`` times; after that nothing more is shown.


_PROMPT_END = 16  # tokens that show whether a prompt opens the reasoning
MOST_READS = 32
_UNKNOWN = "\ufffd"  # in the text of a part of a character
_LONGEST_CHARACTER = 4  # tokens


class StreamedChoice:
    """One completion in progress. ``reasoning`` and ``text`` only grow."""

    def __init__(self, tokenizer: TextTokenizer, parser: Parser, call: GatewayCall, prompt: Sequence[int]) -> None:
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


# ---- bytes of single tokens, and the number of tokens


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Bytes of the tokens of one tokenizer (``dialect.TokenTexts``). They are computed once for each token."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        # the characters by which byte-level vocabularies write bytes: printable ones as themselves
        plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(0x100) if byte not in plain]
        self._alphabet = {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
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


# ---- format of tool calls by the chat template
#
# Without an import of ``renderers``, which takes half a second.


AUTO, NONE = "auto", "none"
#: formats whose completions begin with a marker, also if they are plain text: a grammar of the text does not fit them
CHANNELS = frozenset({"gpt-oss", "inkling"})
OPEN_END = "\ue000"  # a character for private use: the place of text that will follow
#: texts in a chat template -> format. The first one whose texts all occur is chosen.
_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|call|>"), "gpt-oss"),
    (("<|tool_calls_section_begin|>", "<think>"), "kimi-k2.5"),
    (("<|tool_calls_section_begin|>",), "kimi-k2"),
    (("｜DSML｜",), "deepseek-v4"),
    (("<｜tool▁calls▁begin｜>", "<think>"), "deepseek-r1"),
    (("<｜tool▁calls▁begin｜>",), "deepseek-v3"),
    (("<minimax:tool_call>",), "minimax-m2"),
    (("<|tool_call>", "<|channel>"), "gemma4"),
    (("hy_tool_call",), "hy3"),
    (("[gMASK]", "<arg_key>", "clear_thinking"), "glm-5"),
    (("[gMASK]", "<arg_key>"), "glm-4.5"),
    (("<tool_call>", "<function="), "qwen3.5"),
    (("<tool_call>", '"arguments"'), "qwen3"),
    (("<|start_header_id|>", '"parameters"'), "llama-3"),
)


def format_of(template: str) -> str:
    """Return the format that a chat template asks for; NONE if it has no known marks."""
    return next((name for marks, name in _MARKS if all(mark in template for mark in marks)), NONE)
