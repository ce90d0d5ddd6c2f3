"""The agent tool_use: results are context, and turns, time, room and mistakes of the model are bounded."""

import asyncio
import json
import threading

import numpy as np
import pytest

from realsys.config.compose import compose
from realsys.config.machine import Machine
from realsys.config.rules import check
from realsys.config.trial_sizes import longest_sequence
from realsys.data.arith import write_char_tokenizer
from realsys.data.prompts import Prompt
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import ConfigError
from realsys.generation.client import SamplingSpec
from realsys.generation.completion import Completion
from realsys.model_files.architecture import END_OF_TURN_ID
from realsys.reward.sandbox.settings import Output, RunEnded
from realsys.rollout import agents
from realsys.rollout.agents import tool_use
from realsys.rollout.agents.tool_use import describe
from realsys.rollout.environments import Judgement, Task
from realsys.types import Ticket

ARGUMENTS = ["experiment=arith_tools", "rollout.agent_args.max_turns=4"]


def call(expression="3+5", name="calculator", key="expression"):
    arguments = json.dumps({key: expression})
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


class Stuck:
    """A tool that never ends."""

    description = describe("stuck", "never ends")

    async def call(self, arguments, timeout_s):
        await asyncio.Event().wait()

    def close(self):
        pass


class Failing(Stuck):
    """A tool whose own connection has a timeout."""

    description = describe("failing", "raises")

    async def call(self, arguments, timeout_s):
        raise TimeoutError("the tool's server does not answer")


class Programs:
    """A sandbox whose program "stuck" runs until its time is over."""

    def run(self, code, stdin, limits):
        if code == "stuck":
            threading.Event().wait(limits.wall_s)
            return Output(RunEnded(-9, "wall"), b"", b"")
        return Output(RunEnded(0), b"8", b"")

    def close(self):
        pass


class Texts:
    """An engine that answers with the texts of a script; a text in ``cut`` is cut off."""

    def __init__(self, tokenizer, texts, cut=()):
        self.tokenizer, self.texts, self.cut = tokenizer, list(texts), cut
        self.spec = SamplingSpec(max_new_tokens=96)
        self.sent, self.specs = [], []

    async def generate(self, token_ids, spec=None):
        self.sent.append(list(token_ids))
        self.specs.append(spec)
        text = self.texts.pop(0)
        tokens = self.tokenizer.encode_text(text) + [END_OF_TURN_ID] * (text not in self.cut)
        ones = np.ones(len(tokens), np.int32)
        return Completion(
            np.array(tokens, np.int32), -ones.astype(np.float32), ones, "length" if text in self.cut else "stop"
        )


class LastText:
    """An environment whose answer is the text that it judged."""

    async def judge(self, task, response):
        return Judgement(1.0, True, answer=f"{response.turn}:{response.text}")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    write_char_tokenizer(folder, chat=True)
    return TextTokenizer(folder)


def play(tokenizer, *texts, overrides=(), cut=(), messages=()):
    session = Texts(tokenizer, texts, cut)
    agent = agents.build(compose([*ARGUMENTS, *overrides]), tokenizer, LastText())
    prompt = Prompt("a3b5=", "8", [], messages=list(messages))
    episode = asyncio.run(agent.run(Task(prompt, Ticket("1", 0, 0)), session))
    return episode, session


def trained(tokenizer, episode):
    (row,) = episode.rows
    return tokenizer.decode(row.tokens[row.loss_mask].tolist())


def test_result_of_a_tool_is_context(tokenizer):
    episode, session = play(tokenizer, call(), "#8")
    (row,) = episode.rows
    assert trained(tokenizer, episode) == f"{call()}<|im_end|>#8<|im_end|>"
    assert "<tool_response>8</tool_response>" in tokenizer.decode(row.tokens[~row.loss_mask].tolist())
    assert row.tokens.tolist() == [*session.sent[1], *tokenizer.encode_text("#8"), END_OF_TURN_ID]
    assert episode.metrics == {"turns": 2.0, "tool_calls": 1.0, "tool_errors": 0.0}
    assert episode.answer == "1:#8"


def test_messages_of_the_row_begin_the_conversation(tokenizer):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a3b5="}]
    _, session = play(tokenizer, "#8", messages=messages)
    assert "be brief" in tokenizer.decode(session.sent[0]) and "tools: calculator" in tokenizer.decode(session.sent[0])


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (call("3+x"), "error: not an arithmetic expression"),
        (call(name="search"), "error: there is no tool search"),
        (call(key="formula"), "error: the argument expression must be a text"),
    ],
)
def test_mistake_of_the_model_is_a_result(tokenizer, text, result):
    episode, session = play(tokenizer, text, "#8", overrides=["rollout.agent_args.max_result=200"])
    assert f"<tool_response>{result}</tool_response>" in tokenizer.decode(session.sent[1])
    assert episode.metrics["tool_errors"] == 1.0


def test_malformed_call_is_an_answer(tokenizer):
    episode, _ = play(tokenizer, '<tool_call>{"name": calc</tool_call>')
    assert episode.answer == '0:<tool_call>{"name": calc</tool_call>'


def test_last_turn_ends_the_episode(tokenizer):
    episode, _ = play(tokenizer, *[call()] * 4)
    assert episode.metrics["turns"] == 4.0 and episode.metrics["tool_calls"] == 3.0


def test_call_that_was_cut_off_ends_the_episode(tokenizer):
    episode, _ = play(tokenizer, call(), cut=[call()])
    assert episode.metrics["tool_calls"] == 0.0 and episode.rows[0].finish_reason == "length"


def test_row_without_room_ends_the_episode(tokenizer):
    limit = 40 + len(call()) + 40
    overrides = [f"rollout.agent_limits.max_tokens={limit}", "rollout.agent_args.max_result=200"]
    _, session = play(tokenizer, call(), call("1" * 30), "#8", overrides=overrides)
    assert len(session.sent) == len(session.specs) <= 2
    assert all(len(sent) + spec.max_new_tokens <= limit for sent, spec in zip(session.sent, session.specs, strict=True))


def test_result_is_cut_to_its_bytes(tokenizer):
    _, session = play(tokenizer, call("7" * 60), "#8")
    assert f"<tool_response>{'7' * 32}</tool_response>" in tokenizer.decode(session.sent[1])


def test_tool_that_never_ends_costs_its_time(tokenizer):
    overrides = [f"rollout.agent_args.tools=['{__name__}:Stuck']", "rollout.agent_args.tool_s=0.05"]
    episode, session = play(tokenizer, call(name="stuck"), call(name="stuck"), "#8", overrides=overrides)
    assert "error: the tool took too long" in tokenizer.decode(session.sent[1])
    assert "error: no tool can be called" in tokenizer.decode(session.sent[2])
    assert episode.metrics["tool_errors"] == 2.0


def test_timeout_inside_a_tool_fails_the_episode(tokenizer):
    overrides = [f"rollout.agent_args.tools=['{__name__}:Failing']"]
    with pytest.raises(TimeoutError, match="does not answer"):
        play(tokenizer, call(name="failing"), "#8", overrides=overrides)


def test_stuck_programs_take_no_time_from_others(tokenizer, monkeypatch):
    """Three programs per thread are stuck when a right one comes."""
    monkeypatch.setattr(tool_use, "Sandbox", Programs)
    monkeypatch.setattr(tool_use.shutil, "which", lambda _: "/usr/bin/bwrap")
    monkeypatch.setattr(tool_use.os, "cpu_count", lambda: 2)
    overrides = ["rollout.agent_args.tools=[python]", "rollout.agent_args.tool_s=0.5"]
    agent = agents.build(compose([*ARGUMENTS, *overrides]), tokenizer, LastText())
    programs = [*["stuck"] * 6, "print(8)"]
    sessions = [Texts(tokenizer, [call(code, "python", "code"), "#8"]) for code in programs]

    async def episodes():
        task = Task(Prompt("a3b5=", "8", []), Ticket("1", 0, 0))
        try:
            played = await asyncio.gather(*(agent.run(task, session) for session in sessions))
        finally:
            await agent.close()
        return [episode.metrics["tool_errors"] for episode in played]

    assert asyncio.run(episodes()) == [1.0] * 6 + [0.0]
    assert "<tool_response>8</tool_response>" in tokenizer.decode(sessions[-1].sent[1])


def test_longest_row_counts_turns_and_results():
    config = compose(["experiment=arith_tools"])
    assert longest_sequence(config) == 48 + 2 * 96 + 32 + 64
    check(config, Machine(cpus=8, memory_bytes=64 << 30))
    assert longest_sequence(compose(["experiment=arith_tools", "rollout.agent_limits.max_tokens=300"])) == 300


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["rollout.agent_args.tools=[]"], "must be a list of tools: calculator, python"),
        (["rollout.agent_args.tools=[search]"], "unknown tool"),
        (["rollout.agent_args.tools=[calculator,calculator]"], "name each tool once"),
        (["rollout.agent_args.tools=[calculator,python]"], "install bubblewrap"),
        (["data.chat_template=false"], "must be true"),
        (["rollout.gateway.tool_format=none"], "choose a format by its name"),
    ],
)
def test_launcher_refuses_tools_that_cannot_work(tokenizer, monkeypatch, overrides, problem):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError) as raised:
        agents.check(compose([*ARGUMENTS, *overrides]), tokenizer)
    assert problem in str(raised.value)


def test_template_without_tools_is_refused(tmp_path):
    write_char_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    with pytest.raises(ConfigError, match="shows no tools"):
        agents.check(compose(ARGUMENTS), TextTokenizer(tmp_path))
