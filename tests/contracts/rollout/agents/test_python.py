"""The tool python: programs of the model in the real sandbox."""

import asyncio

import pytest

from realsys.rollout.agents.tool_use import Python, ToolError

pytestmark = pytest.mark.needs("bwrap")


@pytest.fixture
def python():
    tool = Python()
    yield tool
    tool.close()


def run(python, code, timeout_s=20.0):
    return asyncio.run(python.call({"code": code}, timeout_s))


def test_printed_text_is_the_result(python):
    assert run(python, "print(sum(range(5)))") == "10\n"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("print(1)\nraise ValueError('no')", "1\nerror: ValueError: no"),
        ("open('/etc/shadow')", "error: .*(Permission|No such file)"),
        ("import socket; socket.create_connection(('1.1.1.1', 53), 2)", "error: "),
        ("x = bytearray(2 << 30)", "error: (MemoryError|limit reached: memory)"),
    ],
)
def test_failure_is_an_error_for_the_model(python, code, problem):
    with pytest.raises(ToolError, match=problem):
        run(python, code)


def test_endless_program_ends_with_its_time(python):
    with pytest.raises(ToolError, match="limit reached: (cpu|wall)"):
        run(python, "while True: pass", timeout_s=0.5)


def test_episodes_call_it_at_the_same_time(python):
    async def all_of():
        calls = (python.call({"code": f"print({number})"}, 20.0) for number in range(6))
        return await asyncio.gather(*calls)

    assert asyncio.run(all_of()) == [f"{number}\n" for number in range(6)]
