"""Layouts of programming tasks. All of them make the tests of ``realsys.data.layouts.code_tests``."""

from __future__ import annotations

import base64
import binascii
import pickletools
import re
import zlib
from typing import Any

from realsys.data.layouts.code_tests import CallTest, CodeTests, StdioTest
from realsys.data.layouts.contract import ProblemRow, RowError, Values, others, parsed, take, text, texts

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
