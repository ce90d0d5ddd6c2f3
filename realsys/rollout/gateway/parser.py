"""Tool calls and reasoning in completions, parsed by the package ``renderers``.

A format is one of its renderers, by name: it knows how a family of models writes tool calls and reasoning. ``auto``
takes the one whose marks the chat template has (``marks``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from renderers import base as library
from renderers.configs import DefaultRendererConfig, _config_class_for

from realsys.data.tokenizer import TextTokenizer
from realsys.errors import MALFORMED, ConfigError
from realsys.rollout.gateway.choices import AUTO, NONE, OPEN_END, format_of

THINK = "think"
#: formats whose text is not shown before its end: each part begins with a header that is text, too
_WHOLE = frozenset({"gemma4", "gpt-oss", "inkling"})
_THOUGHT = re.compile(r"</?think(:\w+)?>")
#: markers of formats that their library finds in the text, with the characters before their tokens
_TEXTS = {"deepseek-v4": ["<｜DSML｜", "</｜DSML｜"]}
MOST_RENDERERS = 64  # renderers for arguments of the chat template, which agents choose
_DEEPEST = 100  # levels of the arguments of a call: templates and clients read them recursively


@dataclass(frozen=True, slots=True)
class Parsed:
    """Parts of a completion.

    content    without reasoning and without the tool calls of ``calls``; malformed calls stay in it
    reasoning  None if the completion has none
    calls      (id that the model wrote or None, name, arguments)
    malformed  number of calls that stay in the content although the request has tools
    """

    content: str
    reasoning: str | None
    calls: list[tuple[str | None, str, dict[str, Any]]]
    malformed: int = 0


class Parser:
    """Parser of the completions of one model.

    ``format`` and ``reasoning`` are the names that were chosen. A parser is used by one thread.
    """

    def __init__(self, tokenizer: TextTokenizer, format: str, reasoning: str) -> None:
        self.format = format
        self.reasoning = reasoning
        self._ends = frozenset(tokenizer.eos_token_ids)
        self._tokenizer = ParserTokenizer(tokenizer)
        self._renderers: dict[str, library.Renderer] = {}
        self._default = self._build({})
        self._default.parse_response([], prompt_ids=None)  # looks up the markers that it needs
        self._tokenizer.convert_tokens_to_ids(_TEXTS.get(format, []))

    def parse(
        self,
        tokens: Sequence[int],
        tools: Sequence[dict[str, Any]] = (),
        prompt: Sequence[int] = (),
        options: Mapping[str, Any] | None = None,
        *,
        open_end: bool = False,
    ) -> Parsed:
        """Parse a completion. Without ``tools`` its tool calls stay in the content.

        prompt    its tokens or the last ones of them: they show whether the template opened the reasoning
        options   arguments of the chat template, such as enable_thinking
        open_end  more tokens will follow: OPEN_END is where their text would be
        """
        shown = tokens[:-1] if len(tokens) and int(tokens[-1]) in self._ends else tokens
        if self.format == NONE and self.reasoning == NONE:
            return Parsed(self._tokenizer.decode(shown), None, [])
        # The format gets an end of text that it knows: it may end a tool call.
        keeps_end = len(shown) < len(tokens) and self._tokenizer.has(int(tokens[-1]))
        ids = self._tokenizer.completion(shown)
        renderer, before = self._renderer(options or {}), self._prompt(prompt)
        # A stop token of the format that does not stop the model: the library would cut the completion there, and the
        # agent would not see text that is trained.
        ids = self._tokenizer.as_text(ids, renderer.get_stop_token_ids())
        if keeps_end:
            ids.append(int(tokens[-1]))
        if open_end:
            ids.append(self._tokenizer.text_id(OPEN_END))
        try:
            found = renderer.parse_response(ids, tools=list(tools) or None, prompt_ids=before)
        except Exception:  # the library raises anything, for example for a number of 5,000 digits in a call
            return Parsed(self._tokenizer.decode(shown), None, [], malformed=1 if tools or open_end else 0)
        if keeps_end:
            del ids[-1]
        calls = [call for call in found.tool_calls if tools and _is_good(call)]
        content, reasoning = self._content(ids, found, calls), (found.reasoning_content or "").strip()
        if self.format != NONE:
            # Some formats keep white space here or not, as the rest of the completion is: a stream cannot know that.
            content = content.lstrip()
        if self.reasoning == NONE and found.reasoning_content is not None:
            content, reasoning = self._until_tools(ids, found, calls), None
        malformed = len(found.tool_calls) - len(calls) if tools else 0
        return Parsed(content, reasoning or None, [(call.id, call.name, call.arguments) for call in calls], malformed)

    def markers(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the texts at which reasoning begins or ends, and all others that may not be text."""
        if self.format == self.reasoning == NONE:
            return frozenset(), frozenset()
        texts = self._tokenizer.markers()
        thoughts = frozenset(filter(_THOUGHT.fullmatch, texts))
        return thoughts, texts - thoughts

    def shows(self, content: str, tools: Sequence[dict[str, Any]]) -> bool:
        """Return False if content without a marker may still become something else."""
        is_call = bool(tools) and self.format == "llama-3" and content.startswith("{")  # its calls have no marker
        return self.format not in _WHOLE and not is_call

    def _content(self, ids: list[int], found: Any, calls: list[Any]) -> str:
        """Return the content of the library, and after it the attempts at tool calls that are not in ``calls``."""
        content: str = found.content
        rest = [call for call in found.tool_calls if call not in calls]
        if rest and not calls and rest[0].token_span is not None:
            start = rest[0].token_span[0]
            return content + self._between(ids[:start], content) + self._tokenizer.decode(ids[start:])
        spans = [call.token_span and ids[slice(*call.token_span)] for call in rest]
        return content + "".join(
            self._tokenizer.decode(span) if span else call.raw for span, call in zip(spans, rest, strict=True)
        )

    def _between(self, ids: list[int], content: str) -> str:
        """Return the text after the content, such as white space and the opening of the tool calls."""
        return self._tokenizer.decode(ids).rpartition(content)[2] if content else ""

    def _until_tools(self, ids: list[int], found: Any, calls: list[Any]) -> str:
        """Return all text up to the first tool call, with the reasoning in it."""
        if not calls or calls[0].token_span is None:
            return self._tokenizer.decode(ids)
        before = ids[: calls[0].token_span[0]]
        return self._tokenizer.decode(before).removesuffix(self._between(before, found.content))

    def _prompt(self, prompt: Sequence[int]) -> list[int] | None:
        if not prompt:
            return None
        ids = self._tokenizer.prompt(prompt)
        if self.format != NONE:
            return ids
        # The library knows one form of turns here. It needs only to know that the prompt opened the reasoning.
        opened = self._tokenizer.decode(ids).rstrip().endswith("<think>")
        return [self._tokenizer.convert_tokens_to_ids("<think>")] if opened else None

    def _renderer(self, options: Mapping[str, Any]) -> library.Renderer:
        """Return the renderer for these arguments of the chat template; those that it does not know have no effect."""
        if self.format == NONE or not options:
            return self._default
        names = _config_class_for(self.format).template_field_names()
        settings = {name: options[name] for name in sorted(names & options.keys())}
        key = repr(settings)
        if key not in self._renderers:
            if len(self._renderers) >= MOST_RENDERERS:
                del self._renderers[next(iter(self._renderers))]
            try:
                self._renderers[key] = self._build(settings)
            except ValueError:  # a value that the library does not know
                self._renderers[key] = self._default
        return self._renderers[key]

    def _build(self, settings: dict[str, Any]) -> library.Renderer:
        if self.format == NONE:
            config = DefaultRendererConfig(reasoning_parser=THINK)
        else:
            config = _config_class_for(self.format)(**settings)
        return library.create_renderer(self._tokenizer, config)


def formats() -> list[str]:
    """Return the names that ``rollout.gateway.tool_format`` may have."""
    library._populate_registry()
    return [AUTO, NONE, *sorted(name for name in library.RENDERER_REGISTRY if name != "default")]


def parser_of(tokenizer: TextTokenizer, tool_format: str = AUTO, reasoning_format: str = AUTO) -> Parser:
    """Build the parser of a model's completions. Raises ConfigError for a name that is not known."""
    check(tool_format, reasoning_format)
    template = tokenizer.chat_source
    if tool_format == AUTO:
        tool_format = format_of(template)
    if reasoning_format == AUTO:
        reasoning_format = THINK if tool_format != NONE or "<think>" in template else NONE
    try:
        return Parser(tokenizer, tool_format, reasoning_format)
    except Exception as error:  # a renderer may need files of its model, and raises anything
        problem = f"the renderer cannot be built: {error}: choose one of {', '.join(formats())}"
        raise ConfigError("rollout.gateway.tool_format", tool_format, problem) from None


def check(tool_format: str, reasoning_format: str) -> None:
    """Raise ConfigError for a name that is not known."""
    for field, value, names in (
        ("tool_format", tool_format, formats),
        ("reasoning_format", reasoning_format, lambda: [AUTO, NONE, THINK]),
    ):
        if value not in names():
            raise ConfigError(f"rollout.gateway.{field}", value, f"not known: choose one of {', '.join(names())}")


def _is_good(call: library.ParsedToolCall) -> bool:
    """Return True for a tool call that an agent can carry out: its arguments are an object that JSON can write."""
    if call.status != library.ToolCallParseStatus.OK or not call.name or not isinstance(call.arguments, dict):
        return False
    if not _is_shallow(call.arguments, _DEEPEST):
        return False
    try:
        json.dumps(call.arguments, allow_nan=False)
        msgspec.json.decode(msgspec.json.encode([call.id, call.name, call.arguments]))
    except (ValueError, *MALFORMED):  # NaN or infinity, lone surrogates, thousands of digits
        return False
    return True


def _is_shallow(value: Any, levels: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(item, levels - 1) for item in items)


# ---- the tokenizer in the form that the package ``renderers`` reads
#
# The parsers of ``renderers`` find the markers of a format, such as <tool_call>, by the id of a token. Many small
# models have no such token: they write the marker with several tokens, or with characters. So the adapter gives a new
# id to each marker that the tokenizer does not have, and puts that id where the decoded text has the marker.
#
#     tokens of the engine      [ 8, 97, 12, 44,  5 ]   "ok" "<to" "ol_" "call>" "{"
#     ids for the parser        [ 8, M+0, M+1 ]         "ok" <tool_call> "{"
#
# These ids are for the parser only. Nothing that is trained or sent to the engine passes through here.


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
