"""Which text of a completion is the program."""

import pytest

from realsys.data.lines import CodeTests
from realsys.reward.verifiers.code import last_block, program_in

STUB = "import math\n\ndef area(r):\n    '''Area of a circle.'''\n"
PLAIN = CodeTests(source="assert f() == 1")
CONTINUED = CodeTests(function="area", source="assert area(0) == 0", preamble="import math\n", stub=STUB)
WHOLE = "def area(r):\n    return math.pi * r * r\n"


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\na\n```\nor\n```\nb\n```\n", "b\n"),
        ("```py\na\n", "a\n"),
        ("````md\n```\na\n```\n````\n", "```\na\n```\n"),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("~~~\na\n~~~", "a\n"),
        ("a = `b`", None),
    ],
)
def test_last_block_counts(text, block):
    assert last_block(text) == block


def test_only_text_behind_thinking_counts():
    assert program_in("<think>```python\nx=1\n```</think>\n```python\ny=2\n```", PLAIN) == "y=2\n"
    assert program_in("<think>```python\nx=1\n```", PLAIN) is None


def test_prose_is_no_program():
    assert program_in("I do not know it.", PLAIN) is None
    assert program_in("def f(): return 1", PLAIN) == "def f(): return 1"


def test_whole_function_gets_the_preamble():
    assert program_in(f"```python\n{WHOLE}```", CONTINUED) == f"import math\n\n{WHOLE}"


@pytest.mark.parametrize("fence", ["{}", "```python\n{}```"])
def test_body_continues_the_stub(fence):
    body = "    return math.pi * r * r\n"
    assert program_in(fence.format(body), CONTINUED) == STUB + body


def test_other_language_needs_a_block():
    tests = CodeTests(language="c", source="x")
    assert program_in("int main(){}", tests) is None
    assert program_in("```c\nint main(){}\n```", tests) == "int main(){}\n"
