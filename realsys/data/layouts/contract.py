"""The contract of a layout: a pure function ``(row, **args) -> ProblemRow`` for one row of a published data set.

    source ──{key: value}──> layout ──ProblemRow──> line of the trial's own file      raises RowError: field and problem

``data.layout`` names the layout; ``auto`` finds it by the keys of the first row. A layout takes the keys that it reads
out of the row and leaves the others in ``ProblemRow.extra``, which reaches agent, environment and verifier unchanged.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any

import msgspec

from realsys.config.doors import LAYOUT
from realsys.config.schema_data import AUTO_LAYOUT
from realsys.data.layouts.code_tests import CodeTests
from realsys.data.lines import Message, Problem, PromptText, problem_of, without_nulls
from realsys.errors import MALFORMED, DataError

Values = Mapping[str, Any]


class RowError(DataError):
    """A field of a row is wrong. The reader of the source adds file and row."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"field {field!r}: {problem}")


class ProblemRow(msgspec.Struct, frozen=True):
    """One problem with the other keys of its row."""

    prompt: PromptText
    answer: str
    extra: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    code_tests: CodeTests | None = None

    def problem(self) -> Problem:
        """Return the checked problem. Raises RowError."""
        problem = Problem(self.prompt, self.answer, self.tools, self.code_tests)
        if text := problem_of(problem):
            raise RowError(next(name for name in Problem.__struct_fields__ if name in text), text)
        return problem

    def line(self) -> dict[str, Any]:
        """Return the keys of the line of the trial's own file."""
        checked: dict[str, Any] = msgspec.to_builtins(self.problem())
        return {**self.extra, **checked}


# ---- reading of the fields of a row; an error names the field


def take(row: Values, field: str) -> Any:
    """Return the value of a field that must be there. Raises RowError."""
    if row.get(field) is None:
        raise RowError(field, "is missing")
    return row[field]


def text(row: Values, field: str) -> str:
    """Return a text that must not be empty. Raises RowError."""
    value = take(row, field)
    if not isinstance(value, str):
        raise RowError(field, f"must be a text, not {type(value).__name__}")
    if not value.strip():
        raise RowError(field, "is empty")
    return value


def texts(row: Values, field: str) -> list[str]:
    """Return a list of texts, which may be empty. Raises RowError."""
    value = row.get(field)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise RowError(field, "must be a list of texts")
    return value


def answer_text(value: Any, field: str) -> str:
    """Return a reference answer as text: numbers as they are written, lists of several entries and objects as JSON.

    A table has 7 as 7.0 if its column has floats; the answer is 7. Raises RowError.
    """
    if isinstance(value, list) and len(value) == 1:
        return answer_text(value[0], field)
    if isinstance(value, str):
        if not value.strip():
            raise RowError(field, "is empty")
        return value
    if isinstance(value, float | Decimal) and not math.isfinite(value):
        raise RowError(field, f"is {value}, which is no answer")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list) and any(isinstance(one, int | float) for one in value):
        raise RowError(field, f"has {len(value)} numbers, which read like an interval: write one answer as a text")
    if isinstance(value, list | dict):
        return msgspec.json.encode(value).decode()
    if isinstance(value, date | time):
        return value.isoformat()
    raise RowError(field, f"must be a text or a number, not {type(value).__name__}")


def parsed(value: str, field: str) -> Any:
    """Parse JSON text. Raises RowError."""
    try:
        return msgspec.json.decode(value)
    except MALFORMED as error:
        raise RowError(field, f"is not JSON: {error}") from None


def others(row: Values, *taken: str) -> dict[str, Any]:
    """Return the keys that no layout has taken, without those that are empty in a table's row."""
    return {key: value for key, value in row.items() if key not in taken and value is not None}


def chat(value: Any, field: str) -> list[Message]:
    """Read messages in the form of OpenAI's API. Parts of text are joined. Raises RowError."""
    if not isinstance(value, list) or not value:
        raise RowError(field, "must be a list of messages that is not empty")
    return [_message(message, f"{field}[{number}]") for number, message in enumerate(value)]


def prompt_of(value: Any, field: str) -> PromptText:
    """Read a prompt, which is a text or a list of messages. Raises RowError."""
    return text({field: value}, field) if isinstance(value, str) else chat(value, field)


def tools_of(value: Any, field: str) -> list[dict[str, Any]]:
    """Read descriptions of tools: a list of objects, or JSON text of one. Raises RowError."""
    if isinstance(value, str):
        value = parsed(value, field) if value.strip() else None
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError(field, "must be a list of objects, one per tool")
    filled: list[dict[str, Any]] = without_nulls(value)
    return filled


def _message(value: Any, field: str) -> Message:
    if not isinstance(value, dict):
        raise RowError(field, f"must be an object with role and content, not {type(value).__name__}")
    content = _content(value.get("content"), f"{field}.content")
    calls = copy.deepcopy(value.get("tool_calls") or [])
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            # Templates write the arguments as JSON; a text would be written as JSON twice.
            function["arguments"] = parsed(function["arguments"], f"{field}.tool_calls.function.arguments")
    try:
        return Message.read({**value, "content": content, "tool_calls": calls})
    except MALFORMED as error:
        raise RowError(field, str(error)) from None


def _content(value: Any, field: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "".join(part["text"] for part in value)
    raise RowError(field, "must be a text, or a list of parts of type text: images and sound are not supported")


# ---- choice of the layout: by its name, or by the keys of the first row

OWN = "realsys"
Layout = Callable[[Values], ProblemRow]

#: Keys of a row -> layout. The first line that fits is taken, so the more particular ones stand first.
_KEYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("livecodebench", ("question_content", "private_test_cases")),
    ("humaneval", ("prompt", "entry_point", "test")),
    ("mbpp", ("test_list",)),
    ("code_contests", ("description", "private_tests")),
    ("code_contests", ("description", "public_tests")),
    ("verl", ("prompt", "reward_model")),
    ("realsys", ("prompt", "answer")),
    ("slime", ("prompt", "label")),
    ("messages", ("messages",)),
    ("deepscaler", ("problem", "answer")),
    ("math", ("problem", "solution")),
    ("gsm8k", ("question", "answer")),
)


def detect(row: Values) -> str | None:
    """Return the name of the layout that has the keys of ``row``, None if no layout has them."""
    return next((name for name, keys in _KEYS if _has_keys(row, keys)), None)


def layout_of(name: str, arguments: Mapping[str, Any], first: Values, where: str) -> Layout:
    """Return the layout ``name`` with its arguments; ``auto`` finds it by ``first``.

    Raises ConfigError, or DataError if no layout fits.
    """
    if name == AUTO_LAYOUT:
        found = detect(first)
        by_name, keys = next(((name, keys) for name, keys in _KEYS if first.keys() >= set(keys)), (found, ()))
        if by_name != found:
            nulls = ", ".join(key for key in keys if first[key] is None)
            problem = f"has the keys of layout {by_name}, but {nulls} is null"
            raise DataError(f"{where}: {problem}: correct it, or set data.layout for all rows")
        if found is None:
            given, known = ", ".join(map(str, first)) or "none", ", ".join(sorted(LAYOUT.builtin))
            raise DataError(f"{where}: no known layout has the keys {given}: set data.layout to one of {known}")
        name = found
    LAYOUT.check(name, arguments)
    return functools.partial(LAYOUT.load(name), **arguments)


def _has_keys(row: Values, keys: Iterable[str]) -> bool:
    return all(row.get(key) is not None for key in keys)
