"""Rows in the layouts of published data sets: what is read, and which field a bad row names."""

import copy
import json
from datetime import date
from decimal import Decimal

import pytest

from realsys.config.doors import LAYOUT
from realsys.data.layouts import RowError, detect, layout_of
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
