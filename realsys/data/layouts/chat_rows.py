"""Layouts with a prompt as text or messages: that of realsys, verl, DAPO-Math-17k, slime, and chats with tools."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from realsys.data.layouts.code_rows import io_tests
from realsys.data.layouts.code_tests import CodeTests
from realsys.data.layouts.contract import (
    ProblemRow,
    RowError,
    Values,
    answer_text,
    chat,
    others,
    parsed,
    prompt_of,
    take,
    tools_of,
)
from realsys.data.lines import Message, Problem
from realsys.errors import MALFORMED

_TOOL_DEFS = "tool_defs"  # the name that the package verifiers gives to the tools of a row
_ANSWERS = ("answer", "label", "ground_truth")


def realsys(row: Values) -> ProblemRow:
    """The layout of realsys itself: ``prompt``, ``answer``, and any others. The answer must be text."""
    own = Problem.__struct_fields__
    given = {key: row[key] for key in own if row.get(key) is not None}
    if isinstance(given.get("prompt"), list):
        given["prompt"] = msgspec.to_builtins(chat(given["prompt"], "prompt"))
    if "tools" in given:
        given["tools"] = tools_of(given["tools"], "tools")
    try:
        problem = msgspec.convert(given, Problem)
    except MALFORMED as error:
        raise RowError(_named(str(error)), str(error)) from None
    extra = {key: value for key, value in row.items() if key not in own}
    return ProblemRow(problem.prompt, problem.answer, extra, problem.tools, problem.code_tests)


def verl(row: Values) -> ProblemRow:
    """``prompt`` and ``reward_model.ground_truth``; ``data_source``, ``ability`` and ``extra_info`` stay in extra.

    A ground truth with ``inputs`` and ``outputs``, as object or as JSON text, is the tests of a program.
    """
    model = take(row, "reward_model")
    if not isinstance(model, dict):
        raise RowError("reward_model", f"must be an object with ground_truth, not {type(model).__name__}")
    field = "reward_model.ground_truth"
    if (truth := model.get("ground_truth")) is None:
        raise RowError(field, "is missing")
    prompt, extra = prompt_of(take(row, "prompt"), "prompt"), others(row, "prompt", "reward_model", "tools")
    tools = tools_of(row.get("tools"), "tools")
    tests = _tests_in(truth, field)
    if tests is not None:
        return ProblemRow(prompt, "", extra, tools, tests)
    if style := model.get("style"):
        extra["reward_style"] = style
    return ProblemRow(prompt, answer_text(truth, field), extra, tools)


def slime(
    row: Values, prompt: str = "prompt", label: str = "label", metadata: str = "metadata", tools: str = "tools"
) -> ProblemRow:
    """``prompt`` as text or messages, and ``label``. ``data.layout_args`` renames the keys.

    The keys of ``metadata`` and the other keys of the row are in extra.
    """
    extra = row.get(metadata)
    if isinstance(extra, str):
        extra = parsed(extra, metadata)
    if extra is not None and not isinstance(extra, dict):
        raise RowError(metadata, f"must be an object, not {type(extra).__name__}")
    return ProblemRow(
        prompt_of(take(row, prompt), prompt),
        answer_text(take(row, label), label),
        others(row, prompt, label, metadata, tools) | (extra or {}),
        tools_of(row.get(tools) or row.get(_TOOL_DEFS), tools),
    )


def messages(row: Values, messages: str = "messages", answer: str = "", tools: str = "tools") -> ProblemRow:
    """A chat in ``messages``, with or without ``tools``.

    The reference is the field ``answer``, ``label`` or ``ground_truth``; without them, the text of the last
    message, which must be the assistant's. That message is not part of the prompt.
    """
    turns = chat(take(row, messages), messages)
    described = tools_of(row.get(tools) or row.get(_TOOL_DEFS), tools)
    fields = [answer] if answer else [field for field in _ANSWERS if row.get(field) is not None]
    if fields:
        reference = answer_text(take(row, fields[0]), fields[0])
    else:
        reference = _reply(turns, messages)
    if turns[-1].role == "assistant":
        turns = turns[:-1]
    return ProblemRow(turns, reference, others(row, messages, tools, *fields[:1]), described)


def _reply(turns: list[Message], field: str) -> str:
    last = turns[-1]
    if last.role != "assistant":
        problem = (
            f"ends with role {last.role!r}, and there is no field {' or '.join(_ANSWERS)}: the reference is missing"
        )
        raise RowError(field, problem)
    if last.content is None or not last.content.strip():
        raise RowError(field, "ends with an assistant's message without text: it is the reference")
    return last.content


def _tests_in(truth: Any, field: str) -> CodeTests | None:
    if isinstance(truth, str) and truth.lstrip().startswith("{") and '"inputs"' in truth:
        try:
            truth = json.loads(truth)
        except ValueError:  # a text with the word, not JSON
            return None
    if not isinstance(truth, dict) or not {"inputs", "outputs"} <= truth.keys():
        return None
    return io_tests(truth, field)


def _named(problem: str) -> str:
    """Return the field that a message of msgspec names: ``... `answer` ``, or ``... at `$.prompt[0].role` ``."""
    quoted = problem.split("`")
    return quoted[-2].removeprefix("$.") if len(quoted) > 2 else "row"
