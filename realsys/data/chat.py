"""Chat templates of HF model directories, rendered as transformers renders them, but without it.

A template is code from the model's author, so it runs in jinja2's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from realsys.data.lines import Message
from realsys.errors import DataError, ModelError

_MARK = "realsys-completion"  # rendered as a completion, to find the end of completions in a conversation


class _Generation(Extension):
    """Tag ``{% generation %}``. It marks the assistant's part for training masks and does not change the text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template with the special tokens that it may use."""

    def __init__(self, source: str, origin: Path, special: dict[str, str]) -> None:
        self._origin = origin
        self._special = special
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"{origin}: chat template cannot be read: {error}") from None

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        """Render the text before the model's completion. DataError if the template refuses the messages."""
        dicts = [msgspec.to_builtins(message) for message in messages]
        try:
            return self._template.render(
                messages=dicts, add_generation_prompt=True, tools=list(tools) or None, documents=None, **self._special
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(f"chat template of {self._origin}: {error}") from None

    def user_turn(self, text: str) -> str:
        """Render a user turn after a completion: the text of the template from the end of the completion on.

        The conversation before it is not needed and not rendered again. Raises DataError for a template whose
        user turn depends on the turns before.
        """
        tails = []
        for before in ([], [Message("user", "b"), Message("assistant", "c")]):
            messages = [*before, Message("user", "a"), Message("assistant", _MARK), Message("user", text)]
            _, mark, tail = self.render(messages).partition(_MARK)
            if not mark or text.strip() not in tail:
                raise DataError(f"chat template of {self._origin}: it drops a turn that is followed by a user turn")
            tails.append(tail)
        if tails[0] != tails[1]:
            problem = "its user turn depends on the turns before, so it cannot be appended to a row"
            raise DataError(f"chat template of {self._origin}: {problem}")
        return tails[0]


def find_chat_template(model: Path, tokenizer_config: dict[str, Any], special: dict[str, str]) -> ChatTemplate | None:
    """Read ``chat_template.jinja``, else tokenizer_config.json; None if neither has a template. Raises ModelError."""
    file = model / "chat_template.jinja"
    if file.is_file():
        return ChatTemplate(file.read_text("utf-8"), file, special)
    origin = model / "tokenizer_config.json"
    value = tokenizer_config.get("chat_template")
    if isinstance(value, list):  # several templates with names
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is None:
        return None
    if not isinstance(value, str):
        raise ModelError(f"{origin}: chat_template must be a string")
    return ChatTemplate(value, origin, special)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
