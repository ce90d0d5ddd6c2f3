"""Text of a completion in progress: it begins the text of the whole completion, whatever follows."""

import itertools
import random
import re

import numpy as np
import pytest

from realsys.generation.completion import Completion
from realsys.rollout.gateway import choices
from realsys.rollout.gateway.choices import StreamedChoice, read_choice
from realsys.rollout.gateway.dialect import GatewayCall
from realsys.rollout.gateway.parser import parser_of
from tests.support.gateway.replies import TOOL
from tests.support.gateway.tokenizers_of_formats import COMPLETIONS, byte_tokenizer, markers_of

#: further completions: what a stop string or a tool call may take back, and what it may not
OTHERS = [
    ("llama-3", '{"name": "add", "parameters": {"a": 1}}'),
    ("llama-3", '{"a": 1} is JSON'),
    ("none", "für 5 € 😀\n and <think> more"),
    ("qwen3", "a < b, <tool, <b>bold</b> and <tool_call"),
    ("qwen3", "<think>\n\nhm < 5 </b>\n</think>\n\n\nhello\n\n"),
    ("qwen3", "<think>\nhm <tool_call>\n{}\n</tool_call> no\n</think>\nhello"),
    ("qwen3", "<think>\ncut off"),
    ("glm-4.5", "\n<think>hm</think>\n\n hello"),
    ("deepseek-v4", '<think>hm</think>hello\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n'
     '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'),
]  # fmt: skip
CASES = [*COMPLETIONS.items(), *OTHERS]


def stream(tokenizer, parser, call, tokens, sizes):
    """Add ``tokens`` in pieces; return the states after each piece."""
    choice, states, begin = StreamedChoice(tokenizer, parser, call, []), [("", "")], 0
    while begin < len(tokens):
        end = begin + next(sizes)
        choice.add(tokens[begin:end])
        states.append((choice.reasoning, choice.text))
        begin = end
    return states


def whole(tokenizer, parser, call, tokens, reason="stop"):
    zeros = np.zeros(len(tokens), np.float32)
    completion = Completion(np.array(tokens, np.int32), zeros, np.zeros(len(tokens), np.int32), reason)
    return read_choice(tokenizer, parser, call, [], completion, "c1")


def assert_begins(states, choice):
    """Each state begins the next one, and the last one begins the choice."""
    ends = [*states, (choice.reasoning or "", choice.text)]
    for state, later in itertools.pairwise(ends):
        assert all(b.startswith(a) for a, b in zip(state, later, strict=True)), (state, later)


@pytest.mark.parametrize("single", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("reasoning", ["auto", "none"])
@pytest.mark.parametrize(("name", "text"), CASES)
def test_text_in_progress_begins_the_whole(tmp_path, name, text, reasoning, single):
    tokenizer = byte_tokenizer(tmp_path, markers_of(text) if single else [])
    parser, tokens = parser_of(tokenizer, name, reasoning), [*tokenizer.encode_text(text), tokenizer.eos_token_id]
    for call in (
        GatewayCall("chat", tools=[TOOL]),
        GatewayCall("chat"),
        GatewayCall("text"),
        GatewayCall("chat", tools=[TOOL], stop=("ll", "m<")),
    ):
        end = next((k for k in range(len(tokens)) if any(s in tokenizer.decode(tokens[:k]) for s in call.stop)), None)
        ended = tokens[:end]
        for choose in (lambda: 1, lambda: 7, lambda: random.Random(3).randint(1, 12)):
            states = stream(tokenizer, parser, call, ended, iter(choose, None))
            assert_begins(states, whole(tokenizer, parser, call, ended))


@pytest.mark.parametrize("single", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize(("name", "text"), [*COMPLETIONS.items(), OTHERS[-1]])
def test_reasoning_and_text_are_shown_before_the_call(tmp_path, name, text, single):
    """They do not wait for the end of the completion."""
    tokenizer = byte_tokenizer(tmp_path, markers_of(text) if single else [])
    states = stream(tokenizer, parser_of(tokenizer, name), GatewayCall("chat", tools=[TOOL]),
                    tokenizer.encode_text(text), iter(lambda: 1, None))  # fmt: skip
    assert ("h", "") in states and ("hm", "h") in states and states[-1] == ("hm", "hello")
    assert len([state for state in states if state[1] == "hel"]) == 1


def test_each_token_of_plain_text_is_shown(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, [])
    states = stream(tokenizer, parser_of(tokenizer, "qwen3"), GatewayCall("chat", stop=("ab",)),
                    tokenizer.encode_text("five€aab"), iter(lambda: 1, None))  # fmt: skip
    assert [text for _, text in states] == [
        "",
        "f",
        "fi",
        "fiv",
        "five",
        "five",
        "five",
        "five€",
        "five€",
        "five€a",
        "five€a",
    ]


@pytest.mark.parametrize("single", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize(("name", "text"), CASES)
def test_any_text_in_progress_begins_the_whole(tmp_path, name, text, single):
    """Also that of a completion that is malformed, or cut anywhere."""
    choose, parts = random.Random(name), [part for part in re.split(r"(<[^<>]*>|[{}\n ])", text) if part]
    tokenizer = byte_tokenizer(tmp_path, markers_of(text) if single else [])
    parser = parser_of(tokenizer, name)
    for _ in range(40):
        sample = list(parts)
        for _ in range(choose.randint(1, 3)):
            sample[choose.randrange(len(sample))] = choose.choice(["x", "\n", "<", "</", *parts])
        tokens = [*tokenizer.encode_text("".join(sample)), tokenizer.eos_token_id]
        tokens = tokens[: choose.choice([None, len(tokens) // 2])]
        call = GatewayCall("chat", tools=choose.choice([[], [TOOL]]))
        states = stream(tokenizer, parser, call, tokens, iter(lambda: choose.choice([1, 3, 40]), None))
        assert_begins(states, whole(tokenizer, parser, call, tokens, choose.choice(["stop", "length"])))


def test_parser_reads_a_completion_a_bounded_number_of_times(tmp_path, monkeypatch):
    tokenizer = byte_tokenizer(tmp_path, ["<think>"])
    parser, reads = parser_of(tokenizer, "qwen3"), []
    monkeypatch.setattr(
        parser, "parse", lambda *args, parse=parser.parse, **more: reads.append(1) or parse(*args, **more)
    )
    states = stream(
        tokenizer, parser, GatewayCall("chat"), tokenizer.encode_text("x<think>" * 1000), iter(lambda: 1, None)
    )
    assert len(reads) == choices.MOST_READS + 1 and states[-1][1].startswith("x<think>x")
