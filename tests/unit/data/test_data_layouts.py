"""Rows in the layouts of published data sets: what is read, and which field a bad row names."""

import base64
import copy
import json
import os
import pickle
import struct
import tracemalloc
import zlib
from datetime import date
from decimal import Decimal

import pytest

from realsys.config.doors import LAYOUT
from realsys.data.layouts import RowError, detect, inflate, layout_of, packed_text, pickled_text
from realsys.data.lines import CallTest, CodeTests, Message, StdioTest, code_tests_of
from realsys.errors import ConfigError, DataError
from tests.support.data import data_rows as rows
from tests.support.data.data_rows import ROWS


def read(row, name="auto", **arguments):
    return layout_of(name, arguments, row, "f:1")(row)


def changed(row, path, value):
    """Copy a row with one value replaced, or removed if ``value`` is ``...``."""
    row = copy.deepcopy(row)
    *parents, last = path.split(".")
    inner = row
    for name in parents:
        inner = inner[name]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return row


@pytest.mark.parametrize("name", sorted(ROWS))
def test_layout_is_detected_and_checked(name):
    row = copy.deepcopy(ROWS[name])
    found = detect(row)
    assert LAYOUT.builtin[found] == LAYOUT.builtin[name]
    read(row).problem()
    assert row == ROWS[name], "a layout must not change the row"


def test_every_built_in_layout_has_a_row():
    assert set(ROWS) == set(LAYOUT.builtin)


@pytest.mark.parametrize("name", ["verl", "dapo", "slime", "gsm8k", "math", "deepscaler", "realsys"])
def test_math_rows_have_the_final_answer(name):
    assert read(ROWS[name]).answer == "18"


def test_other_keys_stay_in_extra():
    assert read(rows.VERL).extra == {
        "data_source": "openai/gsm8k",
        "ability": "math",
        "extra_info": {"split": "train", "index": 0},
        "reward_style": "rule",
    }
    assert read(rows.GSM8K).extra == {"solution": "6 * 3 = <<6*3=18>>18 eggs."}
    assert read(rows.MATH).extra.keys() == {"level", "type", "solution"}
    assert read(rows.SLIME).extra == {"level": 2}
    assert read(rows.OWN).extra == {"level": 1}


def test_slime_keys_are_configurable():
    row = {"question": "6 * 3?", "target": 18, "info": '{"a": 1}', "functions": rows.TOOLS, "id": 7}
    names = {"prompt": "question", "label": "target", "metadata": "info", "tools": "functions"}
    found = read(row, "slime", **names)
    assert (found.prompt, found.answer, found.tools) == ("6 * 3?", "18", rows.TOOLS)
    assert found.extra == {"a": 1, "id": 7}
    with pytest.raises(ConfigError, match="layout_args"):
        read(row, "slime", labels="target")


def test_verl_tests_become_code_tests():
    truth = {"inputs": ["1\n", ["2", "3"]], "outputs": ["2\n", "6\n"]}
    for value in (truth, json.dumps(truth)):
        found = read(changed(rows.VERL, "reward_model.ground_truth", value))
        assert found.code_tests.stdio == [StdioTest("1\n", "2\n"), StdioTest("2\n3", "6\n")]
        found.problem()
    calls = {"fn_name": "double", "inputs": [[1]], "outputs": [2]}
    found = read(changed(rows.VERL, "reward_model.ground_truth", calls))
    assert found.code_tests == CodeTests(function="double", calls=[CallTest([1], 2)])


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{ x^{2} }.", "x^{2}"),
        ("so $\\boxed 7$.", "7"),
        ("\\fbox{3}", "3"),
        ("\\boxed{\\left\\{1, 2\\right\\}}", "\\left\\{1, 2\\right\\}"),
    ],
)
def test_last_box_is_the_answer(solution, answer):
    assert read(changed(rows.MATH, "solution", solution)).answer == answer


def test_math_answer_counts_before_the_box():
    assert read({**rows.MATH, "answer": "18 eggs"}, "math").answer == "18 eggs"


def test_gsm8k_number_loses_its_commas():
    assert read(changed(rows.GSM8K, "answer", "Sum.\n#### 1,800")).answer == "1800"


def test_livecodebench_stdin_tests():
    tests = read(rows.LIVECODEBENCH).code_tests
    assert tests == CodeTests(stdio=[StdioTest("1\n", "2\n"), StdioTest("5\n", "10\n")])


def test_livecodebench_functional_tests():
    cases = [{"input": '[1, 2]\n"a"', "output": "[2]", "testtype": "functional"}]
    row = rows.LIVECODEBENCH | {
        "starter_code": "class Solution:\n    def double(self, xs, s):\n        ",
        "metadata": '{"func_name": "double"}',
        "public_test_cases": json.dumps(cases),
        "private_test_cases": json.dumps(cases),  # some versions of the set have plain JSON
    }
    tests = read(row).code_tests
    assert tests.function == "Solution.double" and tests.calls == [CallTest([[1, 2], "a"], [2])] * 2


def test_livecodebench_bounds_its_tests():
    row = changed(rows.LIVECODEBENCH, "private_test_cases", rows.packed_cases([rows.stdin_case("9" * (2 << 20), "")]))
    with pytest.raises(RowError, match="private_test_cases.*has more than"):
        read(row, "livecodebench", max_tests_mb=1)
    read(row, "livecodebench", max_tests_mb=3)


def test_humaneval_tests_run():
    """The reference solution passes the tests as a verifier would run them, and a wrong one fails."""
    found = read(rows.HUMANEVAL)
    tests = code_tests_of({"code_tests": found.line()["code_tests"]})
    assert tests.preamble == "import math\n\n\n" and tests.stub == rows.HUMANEVAL["prompt"]
    exec(tests.stub + found.answer + tests.source, {})
    with pytest.raises(AssertionError):
        exec(tests.stub + "    return x\n" + tests.source, {})


def test_setup_of_mbpp_belongs_to_the_tests():
    """It makes objects of the program's classes, so it cannot run before the program."""
    tests = read({**rows.MBPP, "test_setup_code": "root = Node(1)"}).code_tests
    assert tests.preamble == "" and tests.source.startswith("root = Node(1)\nassert ")


def test_mbpp_tests_run():
    found = read(rows.MBPP)
    exec(found.code_tests.preamble + "\n" + found.answer + "\n" + found.code_tests.source, {})
    assert found.code_tests.source.count("assert") == 3 and found.prompt.count("assert") == 2
    sanitized = {**rows.MBPP, "prompt": "Write it.", "test_imports": ["import math"]}
    del sanitized["text"]
    assert read(sanitized).code_tests.preamble == "import math"


def test_mbpp_names_the_called_function():
    """Else tests of a function ``sum`` would call the built-in one."""
    code = "def helper(x):\n    return x\ndef sum(a, b):\n    return helper(a) + b\n"
    found = read({**rows.MBPP, "code": code, "test_list": ["assert sum(10, 15) == 25"]})
    assert found.code_tests.function == "sum"


def test_code_contests_tests_and_limits():
    tests = read(rows.CODE_CONTESTS).code_tests
    assert [test.stdin for test in tests.stdio] == ["1\n", "2\n", "3\n"]
    assert (tests.time_limit_s, tests.memory_limit_mb) == (1.5, 256)
    assert "solutions" not in read(rows.CODE_CONTESTS).extra


def test_chat_with_tools_loses_its_last_reply():
    found = read(rows.MESSAGES)
    assert found.answer == "Yes, 31 degrees." and found.tools == rows.TOOLS
    assert [message.role for message in found.prompt] == ["system", "user", "assistant", "tool"]
    assert found.prompt[2].tool_calls[0]["function"]["arguments"] == {"city": "Rome"}
    own = read({**rows.MESSAGES, "label": 31})
    assert own.answer == "31" and own.prompt == found.prompt


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "6 *"}, {"type": "text", "text": " 3?"}]
    assert read({"messages": [{"role": "user", "content": parts}], "label": "18"}).prompt == [Message("user", "6 * 3?")]


BAD = [
    (rows.VERL, "reward_model", 5, "reward_model"),
    (rows.VERL, "reward_model.ground_truth", None, "reward_model.ground_truth"),
    (rows.VERL, "reward_model.ground_truth", True, "reward_model.ground_truth"),
    (rows.VERL, "reward_model.ground_truth", " ", "reward_model.ground_truth"),
    (rows.VERL, "reward_model.ground_truth", {"inputs": [1], "outputs": []}, "reward_model.ground_truth"),
    (rows.VERL, "reward_model.ground_truth", {"inputs": [], "outputs": []}, "reward_model.ground_truth"),
    (rows.VERL, "reward_model.ground_truth", {"inputs": ["1"], "outputs": [None]}, "reward_model.ground_truth"),
    (rows.VERL, "prompt", [], "prompt"),
    (rows.VERL, "prompt", 5, "prompt"),
    (rows.VERL, "prompt", [{"role": "robot", "content": "a"}], "prompt[0]"),
    (rows.VERL, "prompt", [{"role": "user", "content": None}], "prompt"),
    (rows.VERL, "prompt", [{"role": "assistant", "content": "a"}], "prompt"),
    (rows.SLIME, "label", [], None),
    (rows.SLIME, "label", False, "label"),
    (rows.SLIME, "metadata", [1], "metadata"),
    (rows.SLIME, "metadata", "{", "metadata"),
    (rows.SLIME, "prompt", "  ", "prompt"),
    (rows.GSM8K, "answer", "18", "answer"),
    (rows.GSM8K, "answer", "18 ####", "answer"),
    (rows.GSM8K, "question", 5, "question"),
    (rows.MATH, "solution", "eighteen", "solution"),
    (rows.MATH, "solution", "\\boxed{1", "solution"),
    (rows.MATH, "solution", "\\boxed", "solution"),
    (rows.MATH, "solution", "\\boxed{}", "solution"),
    (rows.DEEPSCALER, "answer", "", "answer"),
    (rows.DEEPSCALER, "problem", "", "problem"),
    (rows.LIVECODEBENCH, "private_test_cases", "gASVBQ==", "private_test_cases"),
    (rows.LIVECODEBENCH, "private_test_cases", "[1]", "private_test_cases"),
    (rows.LIVECODEBENCH, "public_test_cases", "[", "public_test_cases"),
    (rows.LIVECODEBENCH, "question_content", "", "question_content"),
    (rows.HUMANEVAL, "entry_point", "triple", "entry_point"),
    (rows.HUMANEVAL, "test", "", "test"),
    (rows.MBPP, "test_list", [], "test_list"),
    (rows.MBPP, "test_list", [1], "test_list"),
    (rows.CODE_CONTESTS, "private_tests", {"input": ["1"], "output": []}, "private_tests"),
    (rows.CODE_CONTESTS, "description", "", "description"),
    (rows.MESSAGES, "tools", ["weather"], "tools"),
    (rows.MESSAGES, "tools", "[", "tools"),
    (rows.MESSAGES, "messages", [{"role": "user", "content": "a"}], "messages"),
    (rows.MESSAGES, "messages", ["a"], "messages[0]"),
    (rows.MESSAGES, "messages", [{"role": "user", "content": [{"type": "image"}]}], "messages[0].content"),
    (rows.OWN, "answer", 5, "answer"),
    (rows.OWN, "answer", ..., "answer"),
    (rows.OWN, "code_tests", {}, "code_tests"),
    (rows.OWN, "code_tests", {"calls": [{"args": [], "result": 1}]}, "code_tests"),
    (rows.OWN, "code_tests", {"source": "x", "time_limit_s": 0}, "code_tests"),
    (rows.OWN, "code_tests", {"sauce": "x"}, "code_tests"),
]


@pytest.mark.parametrize(("row", "path", "value", "field"), BAD)
def test_bad_row_names_its_field(row, path, value, field):
    name = next(name for name, known in ROWS.items() if known is row)
    if field is None:
        read(changed(row, path, value), name).problem()
        return
    with pytest.raises(RowError) as caught:
        read(changed(row, path, value), name).problem()
    assert caught.value.field == field and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (7.0, "7"),
        (7.5, "7.5"),
        (["42"], "42"),
        ([42], "42"),
        (Decimal("12.50"), "12.50"),
        (date(2026, 1, 2), "2026-01-02"),
    ],
)
def test_answer_of_a_table_is_written_as_people_write_it(value, answer):
    assert read(changed(rows.SLIME, "label", value)).answer == answer


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1, 2], b"42", [], {"a": 1}])
def test_answer_that_no_completion_has(value):
    """Lists of texts and objects are JSON, which verifiers that compare answers refuse."""
    if value in ([], {"a": 1}):
        assert read(changed(rows.SLIME, "label", value)).answer in ("[]", '{"a":1}')
        return
    with pytest.raises(RowError, match="label"):
        read(changed(rows.SLIME, "label", value))


def test_first_row_with_null_decides_no_layout():
    with pytest.raises(DataError, match="keys of layout realsys, but answer is null"):
        read({"prompt": "a?", "answer": None, "label": "1"})


def test_tools_of_verifiers_and_of_verl_are_described():
    tools = [{"type": "function", "function": {"name": "add", "parameters": None}}]
    filled = [{"type": "function", "function": {"name": "add"}}]
    assert read({**rows.VERL, "tools": tools}).tools == filled
    for row in (rows.SLIME, rows.MESSAGES):
        assert read({**row, "tools": None, "tool_defs": tools}).tools == filled


def test_calls_of_verl_may_have_wrapped_results():
    def calls(outputs):
        truth = {"fn_name": "f", "inputs": [[1], [2]], "outputs": outputs}
        return read(changed(rows.VERL, "reward_model.ground_truth", truth)).code_tests.calls

    assert calls([[3], [4]]) == [CallTest([1], [3], True), CallTest([2], [4], True)]
    assert not any(call.wrapped for call in calls([[3], [4, 5]]) + calls([3, 4]))


def test_asserts_of_verl_are_tests():
    truth = {"inputs": [""], "outputs": [""], "assert_case": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}
    tests = read(changed(rows.VERL, "reward_model.ground_truth", truth)).code_tests
    assert (tests.stdio, tests.function) == ([], "add") and tests.source.count("assert") == 2


def test_unknown_keys_list_the_layouts():
    with pytest.raises(DataError, match=r"f:1: no known layout has the keys a, b: set data.layout to one of"):
        read({"a": 1, "b": 2})
    with pytest.raises(ConfigError, match="unknown layout"):
        read(rows.OWN, "verll")


def test_row_without_code_tests_is_no_verdict():
    with pytest.raises(DataError, match="no key 'code_tests'"):
        code_tests_of({})
    with pytest.raises(DataError, match="has no tests"):
        code_tests_of({"code_tests": {}})


# ---- Attacks on the reader of pickled texts: nothing may run, and sizes stay bounded


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def packed(data):
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("text", ["", "[]", "é\n\\u0041 \U0001f600", "x" * 300, "y" * 70_000])
def test_pickled_text_is_read(protocol, text):
    assert packed_text(packed(pickle.dumps(text, protocol)), 1 << 20) == text


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_call_does_not_run(tmp_path, protocol):
    mark = tmp_path / "ran"
    with pytest.raises(ValueError, match="only one text is accepted"):
        pickled_text(pickle.dumps(Bomb(mark), protocol))
    assert not mark.exists()


WHOLE = pickle.dumps("[1, 2]", 4)
OTHERS = [b"x", 1, 2.5, None, True, ["a"], ("a",), {"a": "b"}, {"a"}, print, 1 << 9_000]


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b".",
        b"\x80\x04",
        b"V",
        b"Vabc",
        b"Va\n",
        b"Va\nVb\n.",  # two texts
        b"Va\n.Vb\n.",  # a second pickle after the first
        b"Va\n.cos\nsystem\n.",
        b"cos\nsystem\n(S'true'\ntR.",
        b"Va\ncos\nsystem\nVtrue\n\x85R.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",  # STACK_GLOBAL from two texts
        b"\x80\x04\x8c\x01a\x81.",  # NEWOBJ
        b"\x80\x04\x8c\x01aQ.",  # BINPERSID
        b"\x80\x04\x8c\x01a\x82\x01.",  # EXT1
        b"\x80\x04\x8c\x01ab.",  # BUILD
        b"\x80\x04\x8c\x01a2.",  # DUP
        b"\x80\x04\x8c\x01ah\x00.",  # BINGET
        b"\x80\x04" + b"\x95" + struct.pack("<Q", 1) * 20 + b"\x8c\x01a.",
        b"\x80\x04" * 20 + b"\x8c\x01a.",
        b"\x80\x04\x8c\x01a" + b"\x94" * 20 + b".",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"a.",  # a length beyond the data
        b"X" + struct.pack("<I", 0xFFFFFFFF) + b"a.",
        b"S'abc'\n.",  # a byte string of Python 2
        b"\x8c\x01\xff.",  # not UTF-8
        b"I" + b"9" * 10_000 + b"\n.",
        bytes(range(256)),
        *[pickle.dumps(value, protocol) for value in OTHERS for protocol in range(pickle.HIGHEST_PROTOCOL + 1)],
        *[WHOLE[:end] for end in range(1, len(WHOLE))],
        *[WHOLE + WHOLE[: end + 1] for end in range(len(WHOLE))],
    ],
    ids=lambda pickled: repr(pickled)[:40],
)
def test_hostile_pickle_is_refused(pickled):
    with pytest.raises(ValueError, match=r"^is not a pickled text"):
        pickled_text(pickled)


def test_zip_bomb_stops_at_the_bound():
    """64 MiB in 64 KiB: the memory that is taken depends on the bound, not on the bomb."""
    bomb = base64.b64encode(zlib.compress(b"\x00" * (64 << 20), 9)).decode()
    tracemalloc.start()
    with pytest.raises(ValueError, match="has more than 1048640 bytes"):
        packed_text(bomb, 1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_bound_counts_the_text_alone():
    text = "x" * 1000
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert packed_text(packed(pickle.dumps(text, protocol)), 1000) == text
    with pytest.raises(ValueError, match="more than"):
        packed_text(packed(pickle.dumps("x" * 2000)), 1000)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (zlib.compress(b"abc")[:-1], "ends within"),
        (zlib.compress(b"abc") + b"x", "1 bytes after"),
        (b"abc", "cannot be decompressed"),
        (b"", "ends within"),
    ],
)
def test_damaged_stream_is_refused(data, problem):
    with pytest.raises(ValueError, match=problem):
        inflate(data, 100)


@pytest.mark.parametrize("text", ["é", "a b", "abc", "=", "YQ==YQ=="])
def test_text_that_is_not_base64_is_refused(text):
    with pytest.raises(ValueError, match="^is not base64"):
        packed_text(text, 100)
