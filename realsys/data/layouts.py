"""The contract of a layout: a pure function ``(row, **args) -> ProblemRow`` for one row of a published data set.

    source ──{key: value}──> layout ──ProblemRow──> line of the trial's own file      raises RowError: field and problem

``data.layout`` names the layout; ``auto`` finds it by the keys of the first row. A layout takes the keys that it reads
out of the row and leaves the others in ``ProblemRow.extra``, which reaches agent, environment and verifier unchanged.
"""

from __future__ import annotations

import base64
import binascii
import copy
import functools
import json
import math
import pickletools
import re
import zlib
from collections.abc import Callable, Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any

import msgspec

from realsys.config.doors import LAYOUT
from realsys.config.schema_data import AUTO_LAYOUT
from realsys.data.lines import (
    CallTest,
    CodeTests,
    Message,
    Problem,
    PromptText,
    StdioTest,
    media_problem,
    problem_of,
    without_nulls,
)
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
    return next((name for name, keys in _KEYS if all(row.get(key) is not None for key in keys)), None)


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


def read_row(layout: Layout, values: dict[str, Any]) -> tuple[ProblemRow | None, str]:
    """Return the row, or None and its problem. A layout may be code of the user."""
    try:
        row = layout(values)
        if not isinstance(row, ProblemRow):
            return None, f"the layout returned {type(row).__name__}: it must return a ProblemRow"
        row.problem()
        if problem := media_problem(values):
            return None, problem
    except RowError as error:
        return None, str(error)
    except Exception as error:
        return None, " ".join(f"the layout raised {type(error).__name__}: {error}".split())[:300]
    return row, ""


# ---- layouts with a prompt as text or messages: that of realsys, verl, DAPO-Math-17k, slime, and chats with tools


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
        # the field that msgspec names: ``... `answer` ``, or ``... at `$.prompt[0].role` ``
        quoted = str(error).split("`")
        raise RowError(quoted[-2].removeprefix("$.") if len(quoted) > 2 else "row", str(error)) from None
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
        last = turns[-1]
        if last.role != "assistant":
            problem = (
                f"ends with role {last.role!r}, and there is no field {' or '.join(_ANSWERS)}: the reference is missing"
            )
            raise RowError(messages, problem)
        if last.content is None or not last.content.strip():
            raise RowError(messages, "ends with an assistant's message without text: it is the reference")
        reference = last.content
    if turns[-1].role == "assistant":
        turns = turns[:-1]
    return ProblemRow(turns, reference, others(row, messages, tools, *fields[:1]), described)


def _tests_in(truth: Any, field: str) -> CodeTests | None:
    if isinstance(truth, str) and truth.lstrip().startswith("{") and '"inputs"' in truth:
        try:
            truth = json.loads(truth)
        except ValueError:  # a text with the word, not JSON
            return None
    if not isinstance(truth, dict) or not {"inputs", "outputs"} <= truth.keys():
        return None
    return io_tests(truth, field)


# ---- layouts of mathematics: one problem with a final answer


_MARK = "####"
_BOX = "\\boxed"


def gsm8k(row: Values) -> ProblemRow:
    """``question``, and ``answer``: a worked solution whose last line is ``#### 18``. The solution stays in extra."""
    solution = text(row, "answer")
    reasoning, mark, final = solution.rpartition(_MARK)
    final = final.strip().replace(",", "")
    if not mark or not final:
        raise RowError("answer", f"must end with a line {_MARK} and the final answer")
    return ProblemRow(text(row, "question"), final, others(row, "question", "answer") | {"solution": reasoning.strip()})


def competition_math(row: Values) -> ProblemRow:
    """MATH and MATH-500: ``problem`` and ``solution``, whose last box is the answer if there is no ``answer``."""
    solution = text(row, "solution")
    answer = last_box(solution, "solution") if row.get("answer") is None else answer_text(row["answer"], "answer")
    return ProblemRow(text(row, "problem"), answer, others(row, "problem", "answer"))


def problem_answer(row: Values) -> ProblemRow:
    """DeepScaleR and others: ``problem`` and a final ``answer``; a ``solution`` stays in extra."""
    return ProblemRow(
        text(row, "problem"), answer_text(take(row, "answer"), "answer"), others(row, "problem", "answer")
    )


def last_box(solution: str, field: str) -> str:
    """Return what the last ``\\boxed{...}`` or ``\\fbox{...}`` contains, braces balanced. Raises RowError."""
    start = max(solution.rfind(_BOX), solution.rfind("\\fbox"))
    if start < 0:
        raise RowError(field, f"has no {_BOX}: it is the final answer")
    rest = solution[solution.index("b", start) :].removeprefix("boxed").removeprefix("box").lstrip()
    if not rest.startswith("{"):  # \boxed 7
        answer = rest.partition("$")[0].split()
        if not answer:
            raise RowError(field, f"ends after {_BOX}")
        return answer[0]
    depth, escaped = 0, False
    for position, character in enumerate(rest):
        depth += 0 if escaped else {"{": 1, "}": -1}.get(character, 0)
        escaped = character == "\\" and not escaped
        if depth == 0:
            return _not_empty(rest[1:position].strip(), field)
    raise RowError(field, f"has a {_BOX} whose braces are not closed")


def _not_empty(answer: str, field: str) -> str:
    if not answer:
        raise RowError(field, f"has an empty {_BOX}")
    return answer


# ---- layouts of programming tasks
#
# All of them make the tests of ``realsys.data.lines``.


MIB = 1 << 20
_REPLY = "Reply with the whole program in one ```python block."
_STDIO = f"Read the input from stdin and write the output to stdout. {_REPLY}"


def humaneval(row: Values) -> ProblemRow:
    """``prompt`` (start of a function), ``entry_point`` and ``test``, which defines ``check(candidate)``."""
    stub, function = text(row, "prompt"), text(row, "entry_point")
    before, found, _ = stub.partition(f"def {function}(")
    if not found:
        raise RowError("entry_point", f"{function!r} is not defined in prompt")
    source = f"{text(row, 'test')}\n\ncheck({function})\n"
    tests = CodeTests(function=function, source=source, preamble=before, stub=stub)
    prompt = f"Complete this Python function. {_REPLY}\n\n```python\n{stub.rstrip()}\n```"
    answer = row.get("canonical_solution")
    return ProblemRow(prompt, str(answer or ""), others(row, "prompt", "test", "canonical_solution"), code_tests=tests)


def mbpp(row: Values) -> ProblemRow:
    """``text`` (in the sanitized set ``prompt``), ``test_list``: asserts; ``test_setup_code`` or ``test_imports``."""
    field = "text" if row.get("text") is not None else "prompt"
    asserts = texts(row, "test_list")
    if not asserts:
        raise RowError("test_list", "has no tests: any program would pass")
    preamble = "\n".join(texts(row, "test_imports"))
    setup = str(row.get("test_setup_code") or "")  # uses classes of the program
    source = "\n".join([*filter(None, [setup]), *asserts, *texts(row, "challenge_test_list")]) + "\n"
    shown = "\n".join(asserts)
    prompt = f"{text(row, field)} {_REPLY}\n\nThe program must pass these tests:\n\n```python\n{shown}\n```"
    taken = (field, "test_list", "challenge_test_list", "test_imports", "test_setup_code", "code")
    code = str(row.get("code") or "")
    # Named, because it may have the name of a built-in function, which the tests would call instead.
    tests = CodeTests(source=source, preamble=preamble, function=_called(code, source))
    return ProblemRow(prompt, code, others(row, *taken), code_tests=tests)


def code_contests(row: Values) -> ProblemRow:
    """CodeContests: ``description``, and tests with ``input`` and ``output``: public, private and generated."""
    kinds = ("public_tests", "private_tests", "generated_tests")
    stdio = [test for kind in kinds for test in _pairs(row.get(kind), kind)]
    if not stdio:
        raise RowError("private_tests", "is empty, as are the other tests: any program would pass")
    limit = row.get("time_limit")
    seconds = None
    if isinstance(limit, dict):
        seconds = (limit.get("seconds") or 0) + (limit.get("nanos") or 0) / 1e9
    memory = row.get("memory_limit_bytes")
    tests = CodeTests(stdio=stdio, time_limit_s=seconds or None, memory_limit_mb=memory / MIB if memory else None)
    taken = ("description", *kinds, "solutions", "incorrect_solutions", "time_limit", "memory_limit_bytes")
    return ProblemRow(f"{text(row, 'description').rstrip()}\n\n{_STDIO}", "", others(row, *taken), code_tests=tests)


def livecodebench(row: Values, max_tests_mb: int = 256) -> ProblemRow:
    """LiveCodeBench: ``question_content``, ``starter_code``, ``public_test_cases``, ``private_test_cases``.

    Private tests are JSON, or base64(zlib(pickle(JSON))) of at most ``max_tests_mb`` MiB, which is read without
    running the pickle.
    """
    cases = [
        *_cases(text(row, "public_test_cases"), "public_test_cases", max_tests_mb * MIB),
        *_cases(text(row, "private_test_cases"), "private_test_cases", max_tests_mb * MIB),
    ]
    kinds = {case["testtype"] for case in cases}
    if not cases or kinds not in ({"stdin"}, {"functional"}):
        raise RowError("private_test_cases", f"must have tests of one type, stdin or functional, not {sorted(kinds)}")
    starter = row.get("starter_code") or ""
    question = text(row, "question_content").rstrip()
    if kinds == {"stdin"}:
        tests = CodeTests(stdio=[StdioTest(case["input"], case["output"]) for case in cases])
        prompt = f"{question}\n\n{_STDIO}"
    else:
        tests = CodeTests(function=_function(row, starter), calls=[_call(case) for case in cases], stub=starter)
        prompt = f"{question}\n\nComplete this code. {_REPLY}\n\n```python\n{starter.rstrip()}\n```"
    taken = ("question_content", "public_test_cases", "private_test_cases")
    return ProblemRow(prompt, "", others(row, *taken), code_tests=tests)


def io_tests(value: dict[str, Any], field: str) -> CodeTests:
    """Read ``inputs``, ``outputs``, perhaps ``fn_name`` and ``assert_case``, as APPS, TACO and verl have them."""
    inputs, outputs, function = value.get("inputs"), value.get("outputs"), value.get("fn_name") or ""
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise RowError(field, "inputs and outputs must be lists of the same length")
    asserts = "\n".join(texts(value, "assert_case"))
    if not inputs and not asserts:
        raise RowError(field, "has no tests: any program would pass")
    if function:
        if not all(isinstance(arguments, list) for arguments in inputs):
            raise RowError(f"{field}.inputs", "must be lists of arguments, because fn_name is set")
        # Some sets have each result in a list; a list of one entry may also be the result itself.
        wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
        calls = [CallTest(*pair, wrapped) for pair in zip(inputs, outputs, strict=True)]
        return CodeTests(function=function, calls=calls, source=asserts)
    if None in inputs or None in outputs:
        raise RowError(field, "has null among its inputs and outputs")
    stdio = [StdioTest(_io(i), _io(o)) for i, o in zip(inputs, outputs, strict=True)]
    if asserts:  # these sets have empty texts for programs without input and output
        stdio = [test for test in stdio if test.stdin.strip() or test.stdout.strip()]
        called = re.search(r"assert\b\W*(?:not\b\W*)?([A-Za-z_]\w*)\(", asserts)
        return CodeTests(stdio=stdio, source=asserts, function=called[1] if called else "")
    return CodeTests(stdio=stdio)


def _io(value: Any) -> str:
    """Return one input or output as text; some data sets have a list of its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _pairs(value: Any, field: str) -> list[StdioTest]:
    if value is None:
        return []
    if not isinstance(value, dict):
        raise RowError(field, f"must be an object with input and output, not {type(value).__name__}")
    inputs, outputs = texts(value, "input"), texts(value, "output")
    if len(inputs) != len(outputs):
        raise RowError(field, f"has {len(inputs)} inputs and {len(outputs)} outputs")
    return [StdioTest(*pair) for pair in zip(inputs, outputs, strict=True)]


def _cases(value: str, field: str, max_bytes: int) -> list[dict[str, str]]:
    if not value.lstrip().startswith("["):
        try:
            value = packed_text(value, max_bytes)
        except ValueError as error:
            raise RowError(field, str(error)) from None
    cases = parsed(value, field)
    names = ("input", "output", "testtype")
    if not isinstance(cases, list) or not all(
        isinstance(case, dict) and all(isinstance(case.get(name), str) for name in names) for case in cases
    ):
        raise RowError(field, f"must be a list of objects with the texts {', '.join(names)}")
    return cases


def _called(code: str, source: str) -> str:
    """Return the first function of ``code`` that ``source`` calls, or ""."""
    names = re.findall(r"^def (\w+)", code, re.M)
    return next((name for name in names if re.search(rf"\b{name}\(", source)), "")


def _function(row: Values, starter: str) -> str:
    metadata = take(row, "metadata")
    if isinstance(metadata, str):
        metadata = parsed(metadata, "metadata")
    name = metadata.get("func_name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        raise RowError("metadata", "has no func_name, which functional tests call")
    return f"Solution.{name}" if "class Solution" in starter else name


def _call(case: dict[str, str]) -> CallTest:
    """Read a functional test: one JSON value per line of ``input`` and argument; ``output`` is a JSON value."""
    lines = [line for line in case["input"].split("\n") if line.strip()]
    return CallTest([parsed(line, "input of a test") for line in lines], parsed(case["output"], "output of a test"))


# ---- text from base64(zlib(pickle(text))), without running the pickle
#
# A pickle is a program: ``pickle.loads`` would run it with the rights of the user. Here nothing is run. The opcodes are
# read one by one, and only the program that pushes one text and stops is accepted:
#
#     [PROTO] [FRAME] a text [memo entries] STOP
#
# Sizes are bounded before memory is taken: a small file may inflate to any size.

_BEFORE = frozenset({"PROTO", "FRAME"})
_TEXT = frozenset({"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"})
_AFTER = frozenset({"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"})
_MAX_OPCODES = 8  # PROTO, FRAME, the text, a memo entry and STOP are 5
_OVERHEAD = 64  # bytes of the opcodes around the text


def packed_text(packed: str, max_bytes: int) -> str:
    """Return the text in ``packed``. Raises ValueError for anything but one text of at most ``max_bytes`` bytes."""
    try:
        compressed = base64.b64decode(packed, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"is not base64: {error}") from None
    return pickled_text(inflate(compressed, max_bytes + _OVERHEAD))


def inflate(compressed: bytes, max_bytes: int) -> bytes:
    """Decompress one whole zlib stream. Raises ValueError if it is damaged or has more than ``max_bytes``."""
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(compressed, max_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"cannot be decompressed: {error}") from None
    if len(data) > max_bytes:
        raise ValueError(f"has more than {max_bytes} bytes when it is decompressed")
    if not stream.eof:
        raise ValueError("ends within its compressed data")
    if stream.unused_data:
        raise ValueError(f"has {len(stream.unused_data)} bytes after its compressed data")
    return data


def pickled_text(pickled: bytes) -> str:
    """Return the text of a pickle that holds one text and nothing else. Raises ValueError for any other."""
    pushed: str | None = None
    try:
        for number, (opcode, argument, position) in enumerate(pickletools.genops(pickled)):
            name = opcode.name
            if name == "STOP" and pushed is not None and position == len(pickled) - 1:
                return pushed
            if number < _MAX_OPCODES and name in _TEXT and pushed is None:
                pushed = argument
            elif number >= _MAX_OPCODES or name not in (_BEFORE if pushed is None else _AFTER):
                raise ValueError(f"the pickle has the opcode {name} at byte {position}: only one text is accepted")
    except (ValueError, AssertionError, OverflowError, EOFError) as error:
        raise ValueError(f"is not a pickled text: {error}") from None
    raise ValueError("is not a pickled text: it has no end")
