"""Assistant messages that a client changed, as they were returned to it."""

import pytest

from realsys.rollout.conversation import forms
from realsys.rollout.gateway.capture import Echoes
from tests.support.gateway.replies import choice, tool_call

USER = {"role": "user", "content": "2+3?"}
CALL = {"id": "abcdefg00", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def restored(content, *choices):
    echoes = Echoes()
    for each in choices:
        echoes.remember(each)
    return echoes.restore([USER, {"role": "assistant", "content": content}])[1]


@pytest.mark.parametrize("text", ["", "I add."])
def test_calls_written_as_text_become_calls(text):
    """The tool agent of smolagents sends its calls back so."""
    returned = choice(text, None, tool_call("abcdefg00", a=1))
    written = f"{text}\nCalling tools:\n{[CALL]!s}".strip()
    for content in (written, [{"type": "text", "text": written}]):
        assert forms([USER, restored(content, returned)]) == forms([USER, returned.message()])


def test_calls_that_the_client_read_itself_are_dropped():
    """The code agent of smolagents appends a call that was never returned to it, behind the stop string."""
    returned = choice("Thought\n<code>\nprint(5)\n", stop="</code>")
    appended = [CALL | {"id": "call_1"}]
    written = f"Thought\n<code>\nprint(5)\n</code>\nCalling tools:\n{appended!s}"
    assert forms([restored(written, returned)]) == forms([returned.message()])


def test_stop_string_that_was_written_again_is_cut():
    assert restored("five</answer>", choice("five", stop="</answer>"))["content"] == "five"
    assert restored("six</answer>", choice("five", stop="</answer>"))["content"] == "six</answer>"


@pytest.mark.parametrize(
    "content",
    ["five", "Calling tools:\n[", "Calling tools:\n[{'id': open('x')}]", "Calling tools:\n[1]", "Calling tools: none"],
)
def test_other_texts_stay(content):
    assert restored(content, choice("", None, tool_call())) == {"role": "assistant", "content": content}


def test_messages_of_others_stay():
    messages = [{"role": "user", "content": f"Calling tools:\n{[CALL]!s}"}]
    assert Echoes().restore(messages) == messages
