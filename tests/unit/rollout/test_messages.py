"""Which messages count as the same one."""

import pytest

from realsys.rollout.conversation import form_of, forms
from tests.support.conversations.episodes import assistant, call, result

SENT = assistant(None, tool_calls=[call(arguments='{"a": 1, "b": "x"}')], reasoning_content="hm")


@pytest.mark.parametrize(
    "echo",
    [
        assistant("", tool_calls=[call()]),
        {"role": "assistant", "tool_calls": [call()]},
        assistant(None, tool_calls=[call(arguments='{ "b":"x",\n"a":1}')]),
        assistant(None, tool_calls=[call(arguments={"a": 1, "b": "x"})]),
        assistant(
            None, tool_calls=[call(number="other")], refusal=None, annotations=[], audio=None, function_call=None
        ),
        assistant(" \n", tool_calls=[call() | {"index": 0}]),
    ],
)
def test_echoed_reply_is_the_same_message(echo):
    assert form_of(echo) == form_of(SENT)


@pytest.mark.parametrize(
    "other",
    [
        assistant("text", tool_calls=[call()]),
        assistant(None),
        assistant(None, tool_calls=[call("look")]),
        assistant(None, tool_calls=[call(arguments='{"a": 2, "b": "x"}')]),
        assistant(None, tool_calls=[call(), call()]),
        SENT | {"role": "user"},
    ],
)
def test_changed_reply_is_another_message(other):
    assert form_of(other) != form_of(SENT)


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert form_of({"role": "user", "content": parts}) == form_of({"role": "user", "content": "a\nb"})
    assert form_of({"role": "user", "content": "a "}) != form_of({"role": "user", "content": "a"})


def test_results_of_tools_belong_to_their_call():
    """New ids for the same calls change nothing; the same texts for exchanged calls do."""
    calls = assistant(None, tool_calls=[call(number="1"), call(number="2")])
    renamed = assistant(None, tool_calls=[call(number="x"), call(number="y")])
    known = forms([calls, result("a", "1"), result("b", "2")])
    assert forms([renamed, result("a", "x"), result("b", "y")]) == known
    assert forms([calls, result("a", "2"), result("b", "1")]) != known
