"""Chat templates of HF model directories, rendered as transformers renders them, but without it.

A template is code from the model's author, so it runs in jinja2's sandbox. ``Tails`` has the text
that a template puts between two completions.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from realsys.data.lines import Message
from realsys.errors import MALFORMED, DataError, ModelError

#: a message in the form of OpenAI's API: the record of a data set, or the object that a client sent
ChatMessage = Message | Mapping[str, Any]
Tools = Sequence[dict[str, Any]]
NO_OPTIONS: Mapping[str, Any] = {}
_PROBE = "realsys-probe"
#: errors that a template raises about messages that it cannot render
_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class _Generation(Extension):
    """Tag ``{% generation %}``. It marks the assistant's part for training masks and does not change the text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template with the special tokens that it may use.

    Templates read different forms of a message. ``render`` uses the first of these forms that the template takes:

        content of a call   None, "" if the template cannot add None to a text
        arguments           an object, its JSON text if the template wants to print a text
        content             a text, a list of one text part if the template prints no text (``takes_parts``)
    """

    def __init__(
        self, source: str, origin: Path, special: dict[str, str], with_tools: ChatTemplate | None = None
    ) -> None:
        self.with_tools = with_tools  # renders chats that have tools
        self.name = f"chat template of {origin}"
        self.source = source
        self._special = special
        self._clock_forms: dict[str, None] = {}  # forms of the date that the template printed
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = self._now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"{origin}: chat template cannot be read: {error}") from None

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Tools = (),
        options: Mapping[str, Any] = NO_OPTIONS,
        *,
        prompt: bool = True,
    ) -> str:
        """Render the text before the model's completion. DataError if the template refuses the messages.

        ``options`` are further variables of the template, such as enable_thinking. Without ``prompt`` the text ends
        after the last message, without the opening of a completion.
        """
        if tools and self.with_tools is not None:
            return self.with_tools.render(messages, tools, options, prompt=prompt)
        plain = [_plain(message) for message in messages]
        values = {
            **options,
            **self._special,
            "add_generation_prompt": prompt,
            "tools": list(tools) or None,
            "documents": None,
        }
        problem: Exception | None = None
        for form in _forms(plain):
            try:
                return self._template.render(messages=self._with_parts(form), **values)
            except _REFUSALS as error:
                problem = problem or error
        raise DataError(f"{self.name}: {problem}") from None

    def clock(self) -> tuple[str, ...]:
        """Return the date and time as the template prints them: renderings at another one may differ."""
        own = tuple(self._now(form) for form in self._clock_forms)
        return own + (self.with_tools.clock() if self.with_tools is not None else ())

    @cached_property
    def takes_parts(self) -> bool:
        """True for a template that prints a content only if it is a list of parts."""
        shown = []
        for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
            try:
                values = {"add_generation_prompt": True, "tools": None, "documents": None, **self._special}
                text = self._template.render(messages=[{"role": "user", "content": content}], **values)
            except _REFUSALS:
                text = ""
            shown.append(_PROBE in text)
        return shown == [False, True]

    def _now(self, form: str) -> str:
        self._clock_forms[form] = None
        return datetime.now().strftime(form)

    def _with_parts(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not self.takes_parts:
            return messages
        return [message | {"content": [{"type": "text", "text": message["content"] or ""}]} for message in messages]


def text_of(content: Any) -> str | None:
    """Return the text of a content, which is a text or a list of text parts. Raises DataError for other parts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise DataError("content of a message must be a text or a list of parts")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise DataError(f"content has a part of type {kind!r}: only text can be shown to the model")
        texts.append(text)
    return "\n".join(texts)


def _plain(message: ChatMessage) -> dict[str, Any]:
    """Return a message as templates read it: text contents, no empty keys, arguments of calls as objects."""
    value = message.as_object() if isinstance(message, Message) else message
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise DataError("a message must be an object with a role")
    plain = {key: item for key, item in value.items() if item is not None and item != []}
    plain["content"] = text_of(value.get("content"))
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise DataError("a tool call must be an object with a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            read = msgspec.json.decode(arguments)
        except (ValueError, *MALFORMED):
            read = None
        arguments = read if isinstance(read, dict) else arguments
    return {"type": "function", **call, "function": {**function, "arguments": arguments if arguments else {}}}


def _forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages in all forms that a template may want, the usual one first."""
    for form in (messages, [_with_text_arguments(message) for message in messages]):
        if form is not messages and not any("tool_calls" in message for message in messages):
            return
        yield form
        if any(message["content"] is None for message in form):
            yield [message | {"content": message["content"] or ""} for message in form]


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return message | {"tool_calls": calls}


def find_chat_template(model: Path, tokenizer_config: dict[str, Any], special: dict[str, str]) -> ChatTemplate | None:
    """Read ``chat_template.jinja`` and ``additional_chat_templates``, else tokenizer_config.json; None if no file has a
    template. As in transformers, the one that is named ``tool_use`` renders chats with tools. Raises ModelError.
    """
    origin = model / "tokenizer_config.json"
    value = tokenizer_config.get("chat_template")
    named: dict[str, Any] = {"default": value}
    if isinstance(value, list):  # several templates with names
        named = {str(entry.get("name")): entry.get("template") for entry in value if isinstance(entry, dict)}
    if (file := model / "chat_template.jinja").is_file():
        origin, named = file, {"default": file.read_text("utf-8")}
    for file in sorted(model.glob("additional_chat_templates/*.jinja")):
        named[file.stem] = file.read_text("utf-8")
    named = {name: source for name, source in named.items() if source is not None}
    if not named:
        return None
    if "default" not in named:
        raise ModelError(f"{origin}: no chat template is named default; there is {', '.join(named)}")
    for source in named.values():
        if not isinstance(source, str):
            raise ModelError(f"{origin}: chat_template must be a string")
    with_tools = ChatTemplate(named["tool_use"], origin, special) if "tool_use" in named else None
    return ChatTemplate(named["default"], origin, special, with_tools)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


# ---- turns of the assistant in a whole chat: what a model imitates that learns from it
#
#     render of the messages before a turn, with the opening of a completion   is the beginning of the whole text
#     turn                                                                    from there to the token that ends it


class Turns(NamedTuple):
    """A rendered chat, up to the end of the assistant's last turn.

    spans   [start, end) of each turn in characters; without the opening, with the text of the token that ends it
    closed  False if the template prints no such token after the last turn
    """

    text: str
    spans: list[tuple[int, int]]
    closed: bool


def assistant_turns(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools, ends: Sequence[str], first: int = 0
) -> Turns:
    """Render a chat and find the assistant's turns among ``messages[first:]``; ``ends``: texts that end a turn.

    Raises DataError if the template refuses the messages, or prints a turn in another way if others follow it.
    """
    numbers = [i for i, message in enumerate(messages) if i >= first and message.role == "assistant"]
    text = template.render(messages[: numbers[-1] + 1], tools, prompt=False)
    starts = []
    for number in numbers:
        before = template.render(messages[:number], tools)
        if not text.startswith(before):
            problem = f"it prints message {number + 1} in another way than it opens a completion there"
            raise DataError(f"{template.name}: {problem}: give the messages before it as prompt, and it as a text")
        starts.append(len(before))
    spans = []
    for number, start, stop in zip(numbers, starts, [*starts[1:], len(text)], strict=True):
        if mark := next((end for end in ends if end in (messages[number].content or "")), None):
            raise DataError(f"message {number + 1} has {mark!r} in its content, which ends a turn: remove it")
        found = [(at, -len(end)) for end in ends if (at := text.find(end, start, stop)) >= 0]
        if not found and number != numbers[-1]:
            problem = f"it ends message {number + 1} with no token that ends a completion ({', '.join(ends)})"
            raise DataError(f"{template.name}: {problem}: end the chat there, or set eos_token")
        at, length = min(found, default=(stop, 0))
        spans.append((start, at - length))
    return Turns(text[: spans[-1][1]], spans, closed=bool(found))


# ---- tail of a row: the text that a chat template puts between a completion and the next one
#
#     before, reply, after ──mark in place of the completion──> render ──text after the mark──> Tail ──join──> tokens
#
# The completion itself is never rendered, so sampled tokens stay as they are. The tail may depend on any message, so
# the conversation before the reply is rendered with it, but a long one only in part:
#
#     window   the first system and user messages, the first round with tools, and the latest rounds
#
# For the first window of a template, and when the number of messages doubles, the tail is also derived from all
# messages. If the two differ, this template gets all messages from then on (``needs_all``). At each length this is
# done in the first, second, fourth, eighth, ... conversation that reaches this length.

#: Stands for a completion. No text that a model or user writes contains it: it is new in each process.
MARK = f"realsys{secrets.token_hex(12)}"
WINDOW = 12  # messages before a reply that are always rendered
RECENT = 3  # latest messages of a longer conversation that are rendered at least
KEPT_LASTS = 16


@dataclass(frozen=True, slots=True)
class Tail:
    """Text after the mark.

    text     end of the reply's turn, the later turns, the opening of the next completion
    closing  length of the part of ``text`` that ends the reply's turn
    last     the end of the turn where the conversation ends with it, if the template prints another one then; or ""
    in_call  the mark is in the arguments of a tool call, so ``text`` begins with the end of this call
    """

    text: str
    closing: int
    in_call: bool
    last: str = ""


@dataclass(frozen=True, slots=True)
class Join:
    """The place in ``Tail.text`` that follows the sampled tokens in the row.

    clean     the completion ended with the stop token of the template; otherwise the tail inserts the end of the turn
    overlaps  the first token at ``start`` is the sampled stop token: it is not repeated
    """

    start: int
    clean: bool
    overlaps: bool


class Tails:
    """Deriver of the tails of one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.needs_all = False
        self._doubled: Counter[int] = Counter()  # binary digits of a length -> conversations that reached it
        self._lasts: dict[bool, list[str]] = {True: [], False: []}  # in_call -> ends of turns, longest first

    def tail(
        self,
        before: Sequence[ChatMessage],
        reply: Mapping[str, Any],
        after: Sequence[ChatMessage],
        tools: Tools = (),
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> Tail:
        """Derive the tail of ``reply``. Raises DataError if the template refuses the messages or hides the reply."""
        window = before if self.needs_all else _window(before)
        if len(window) == len(before):
            return self._derive(before, reply, after, tools, options)
        if not self._is_due(len(before), len(before) + 1 + len(after)):
            return self._derive(window, reply, after, tools, options)
        whole = self._derive(before, reply, after, tools, options)
        try:
            self.needs_all = self._derive(window, reply, after, tools, options) != whole
        except DataError:
            self.needs_all = True
        return whole

    def _is_due(self, length: int, next_length: int) -> bool:
        """Return True if the window must be compared with the whole conversation."""
        if self._doubled and length.bit_length() == next_length.bit_length():
            return False
        self._doubled[next_length.bit_length()] += 1
        return self._doubled[next_length.bit_length()].bit_count() == 1  # a power of two

    def user_turn(self, text: str) -> str:
        """Render a user turn after a completion: the text of the template from the end of the completion on.

        The conversation before it is not needed and not rendered again. Raises DataError for a template whose
        user turn depends on the turns before.
        """
        tails = []
        for before in ([], [Message("user", "b"), Message("assistant", "c")]):
            reply = {"role": "assistant", "content": ""}
            tail = self._derive([*before, Message("user", "a")], reply, [Message("user", text)], (), NO_OPTIONS)
            if text.strip() not in tail.text:
                raise DataError(f"{self._template.name}: it drops a turn that is followed by a user turn")
            tails.append(tail.text)
        if tails[0] != tails[1]:
            problem = "its user turn depends on the turns before, so it cannot be appended to a row"
            raise DataError(f"{self._template.name}: {problem}")
        return tails[0]

    def _derive(
        self,
        before: Sequence[ChatMessage],
        reply: Mapping[str, Any],
        after: Sequence[ChatMessage],
        tools: Tools,
        options: Mapping[str, Any],
    ) -> Tail:
        problem: DataError | None = None
        for marked in _marked(reply):
            try:
                whole = self._template.render([*before, marked, *after], tools, options)
            except DataError as error:
                problem = problem or error
                continue
            _, mark, text = whole.rpartition(MARK)
            if mark:
                in_call = "tool_calls" in marked
                return self._measured(text, in_call, [*before, marked], tools, options)
        raise problem or DataError(f"{self._template.name}: it drops a turn of the assistant before others")

    def _measured(
        self, text: str, in_call: bool, messages: Sequence[ChatMessage], tools: Tools, options: Mapping[str, Any]
    ) -> Tail:
        """Find the end of the turn in ``text``: what the template prints with and without later turns."""
        lasts = self._lasts[in_call]
        known = next((last for last in lasts if text.startswith(last)), None)
        if known is not None:
            return Tail(text, len(known), in_call)
        try:
            last = self._template.render(messages, tools, options, prompt=False).rpartition(MARK)[2]
        except DataError:
            return Tail(text, 0, in_call)  # then only a stop token at the very beginning is recognised
        if text.startswith(last):
            if last and len(lasts) < KEPT_LASTS:
                lasts.append(last)
                lasts.sort(key=len, reverse=True)
            return Tail(text, len(last), in_call)
        end = 0 if in_call else self._end(text, messages, tools, options)
        return Tail(text, end, in_call, last) if end else Tail(text, _shared(text, last), in_call)

    def _end(self, text: str, messages: Sequence[ChatMessage], tools: Tools, options: Mapping[str, Any]) -> int:
        """Return the length of the end of the turn in ``text``, before the opening of the next one; 0: not known."""
        try:
            bare = self._template.render(messages[:-1], tools, options, prompt=False)
            opened = self._template.render(messages[:-1], tools, options)
            followed = self._template.render(messages, tools, options).rpartition(MARK)[2]
        except DataError:
            return 0
        opening = opened.removeprefix(bare)
        end = followed.removesuffix(opening)
        return len(end) if opened != opening and followed != end and text.startswith(end) else 0


def join(tail: Tail, stop: str | None, ends: Sequence[str]) -> Join:
    """Find the place in the tail that follows the sampled tokens.

    ``stop`` is the text of the last sampled token if this is a special token, ``ends`` are the texts of all tokens that
    end a completion.
    """
    found = [at for end in ends if 0 <= (at := tail.text.find(end)) < tail.closing]
    if stop:
        at = tail.text.find(stop)
        # If nothing ends a turn, the opening of the next one does: models of such templates stop at it.
        if 0 <= at <= tail.closing - len(stop) or (at == tail.closing and not found):
            return Join(at, clean=True, overlaps=True)
        if tail.last.startswith(stop):
            return Join(tail.closing, clean=True, overlaps=False)
    if not tail.in_call:
        return Join(0, clean=False, overlaps=False)
    # The parser found the whole call in the sampled tokens, so its end is not inserted once more.
    return Join(min(found, default=tail.closing), clean=False, overlaps=False)


def _shared(text: str, other: str) -> int:
    """Return the length of the longest beginning that both have."""
    pairs = zip(text, other, strict=False)
    return next((at for at, (one, two) in enumerate(pairs) if one != two), min(len(text), len(other)))


def _marked(reply: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return forms of the reply with the mark in place of the sampled text; the first one that is shown is used."""
    as_text = {"role": "assistant", "content": MARK}
    calls = reply.get("tool_calls")
    if not calls:
        return [as_text]
    # In every call, because some templates show the first one only; the tail begins after the last mark.
    marked = [call | {"function": call["function"] | {"arguments": {"value": MARK}}} for call in calls]
    # Without content: some templates print it after the calls, even after the results of the tools.
    as_call = {"role": "assistant", "content": None, "tool_calls": marked}
    return [as_call, as_text]


def _window(before: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Return the part of a long conversation that a tail usually depends on."""
    if len(before) <= WINDOW:
        return before
    roles = [message.role if isinstance(message, Message) else message.get("role") for message in before]
    # A template that wants user and assistant in turn gets both in turn: the beginning ends with a user or a tool.
    begin = next((index + 1 for index, role in enumerate(roles) if role == "user"), 0)
    recent = len(before) - RECENT
    while recent > begin and (roles[recent] != "assistant" or roles[recent - 1] == "assistant"):
        recent -= 1
    # Some templates print the first call or result in another way than the later ones.
    call = end = next((index - 1 for index, role in enumerate(roles) if role == "tool"), recent)
    while end < recent and (end == call or roles[end] == "tool"):
        end += 1
    if not 0 < begin < recent:
        return before
    return [*before[:begin], *before[max(call, begin) : end], *before[recent:]]
