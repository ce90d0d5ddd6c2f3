"""Chat templates of HF model directories, rendered as transformers renders them, but without it.

A template is code from the model's author, so it runs in jinja2's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

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
        tools: Sequence[dict[str, Any]] = (),
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
