"""Agent frameworks train the arith model, unmodified: only their base_url is ours.

An episode with one tool call is compared with the chat that the template renders: an oracle that shares no code with
the recording of conversations.
"""

import json
import re

import pytest

from realsys.data.lines import Message
from tests.support.agents.trained import FRAMEWORKS, needs_frameworks, train


def check(trained, steps):
    """Check what holds for every framework, and print the rewards."""
    assert len(trained.rewards()) == steps and [norm > 0 for norm in trained.gradients()] == trained.signals()
    assert any(trained.signals()) and not trained.errors()
    completions = trained.check_rows()
    rewards = " ".join(f"{reward:.2f}" for reward in trained.rewards())
    print(f"{trained.job.root.name}: {completions} completions, rewards {rewards}")


def check_linear(trained):
    rows = list(trained.rows())
    assert len({(row.meta.ticket_id, row.meta.episode) for row in rows}) == len(rows)
    assert all(row.meta.metrics["gateway/branches"] == 0 for row in rows)


#: row of one tool call: system, tools, user, call, result
ONE_CALL = re.compile(
    r"<\|im_start\|>system\n(?P<system>[^\n]*)\ntools: (?P<tools>[^<]*)<\|im_end\|>\n"
    r"<\|im_start\|>user\n(?P<user>[^<]*)<\|im_end\|>\n"
    r"<\|im_start\|>assistant\n<tool_call>(?P<call>[^<]*)</tool_call><\|im_end\|>\n"
    r"<\|im_start\|>user\n(?P<result>(?:<tool_response>)?[^<]*(?:</tool_response>)?)<\|im_end\|>\n"
    r"<\|im_start\|>assistant\n.*",
    re.DOTALL,
)


def check_chats(trained):
    """Compare the rows of one tool call with the rendering of their whole chat, token for token.

    Only a call that is written as the template writes it can be compared.
    """
    tokenizer, compared = trained.tokenizer, 0
    for row in (row for row in trained.rows() if len(row.runs) == 2):
        found = ONE_CALL.fullmatch(trained.text(row))
        if found is None or (call := call_of(found["call"])) is None:
            continue
        role, result = "user", found["result"]
        if result.startswith("<tool_response>"):
            role, result = "tool", result.removeprefix("<tool_response>").removesuffix("</tool_response>")
        chat = [Message("system", found["system"]), Message("user", found["user"]), Message("assistant", None, [call])]
        tools = [{"type": "function", "function": {"name": name}} for name in found["tools"].split()]
        context = tokenizer.render([*chat, Message(role, result)], tools=tools)
        begin = row.runs[-1][0]  # of the last completion, whose bytes may be no text
        assert row.tokens[:begin] == tokenizer.encode_text(context), trained.text(row)
        compared += 1
    assert compared > 10


def call_of(text):
    """Return the tool call of a completion; None if the template would write it in another way."""
    try:
        call = json.loads(text)
    except ValueError:
        return None
    if text != json.dumps(call) or list(call) != ["name", "arguments"]:
        return None
    return {"id": "1", "type": "function", "function": call}


@pytest.mark.parametrize("example", ["openai_agents", "langgraph_tools", "mini_swe_agent"])
def test_tool_users_are_trained_token_for_token(tmp_path, warm_model, example):
    needs_frameworks()
    trained = train(tmp_path, warm_model, example, "train.total_steps=4", f"rollout.agent_python={FRAMEWORKS}")
    check(trained, 4)
    check_linear(trained)
    check_chats(trained)


def test_smolagents_echoes_extend_the_row(tmp_path, warm_model):
    """It sends its tool calls back as text; the gateway knows them. Only its last resort is another row."""
    needs_frameworks()
    settings = ["train.total_steps=4", f"rollout.agent_python={FRAMEWORKS}", "rollout.agent_limits.max_tokens=2048"]
    trained = train(tmp_path, warm_model, "smolagents_tools", *settings)
    check(trained, 4)
    check_chats(trained)
    assert all(len(row.runs) == 1 for row in trained.rows() if row.meta.row)


def test_openai_loop_has_both_tries_in_a_row(tmp_path, warm_model):
    """In the RolloutWorker."""
    trained = train(tmp_path, warm_model, "openai_loop", "train.total_steps=4")
    check(trained, 4)
    check_linear(trained)
    assert {len(row.runs) for row in trained.rows()} == {1, 2}
