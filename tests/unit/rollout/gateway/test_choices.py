"""Completions as the client reads them; bytes of tokens."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from realsys.data.tokenizer import TextTokenizer
from realsys.generation.completion import Completion
from realsys.rollout.gateway.choices import Vocabulary, read_choice
from realsys.rollout.gateway.dialect import GatewayCall
from realsys.rollout.gateway.parser import parser_of
from tests.support.gateway.replies import TOOL
from tests.support.gateway.tokenizers_of_formats import COMPLETIONS, byte_tokenizer

HERMES = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture
def tokenizer(tmp_path):
    return byte_tokenizer(tmp_path, [])


def read(tokenizer, text, call, finish_reason="stop", name="c1", fmt="qwen3"):
    tokens = np.array(tokenizer.encode_text(text), np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    completion = Completion(tokens, zeros, np.zeros(len(tokens), np.int32), finish_reason)
    return read_choice(tokenizer, parser_of(tokenizer, fmt), call, [], completion, name)


def test_parsed_call_ends_with_tool_calls(tokenizer):
    choice = read(tokenizer, f"I add. {HERMES}{HERMES}", GatewayCall("chat", tools=[TOOL]))
    assert (choice.text, choice.finish_reason) == ("I add.", "tool_calls")
    assert [json.loads(call["function"]["arguments"]) for call in choice.tool_calls] == [{"a": 1}, {"a": 1}]


def test_ids_of_calls_are_stable_and_unique(tokenizer):
    call = GatewayCall("chat", tools=[TOOL])
    first, again, other = (read(tokenizer, HERMES * 2, call, name=name) for name in ("c1", "c1", "c2"))
    ids = [each["id"] for choice in (first, other) for each in choice.tool_calls]
    assert len(set(ids)) == 4 and first.tool_calls == again.tool_calls


def test_id_that_the_model_wrote_stays(tokenizer):
    choice = read(tokenizer, COMPLETIONS["kimi-k2.5"], GatewayCall("chat", tools=[TOOL]), fmt="kimi-k2.5")
    assert [each["id"] for each in choice.tool_calls] == ["functions.add:0"]


@pytest.mark.parametrize(
    "call", [GatewayCall("chat"), GatewayCall("chat", tools=[TOOL], parse_tools=False), GatewayCall("text")]
)
def test_calls_are_not_parsed_unless_wanted(tokenizer, call):
    choice = read(tokenizer, HERMES, call)
    assert (choice.text, choice.tool_calls, choice.finish_reason) == (HERMES, [], "stop")


def test_cut_completion_ends_with_length(tokenizer):
    assert read(tokenizer, "I ad", GatewayCall("chat"), "length").finish_reason == "length"


@pytest.mark.parametrize("kind", ["chat", "text"])
@pytest.mark.parametrize(("text", "shown", "stop"), [("one\n\ntw", "one", "\n\n"), ("one", "one", None)])
def test_stop_string_is_cut_and_named(tokenizer, kind, text, shown, stop):
    choice = read(tokenizer, text, GatewayCall(kind, stop=("##", "\n\n")), fmt="none")
    assert (choice.text, choice.stop) == (shown, stop)


def test_stop_string_in_reasoning_is_cut(tokenizer):
    choice = read(tokenizer, "<think>hm##", GatewayCall("chat", stop=("##",)))
    assert (choice.reasoning, choice.stop, choice.text) == ("hm", "##", "")


def test_stop_string_within_a_cut_completion_stays(tokenizer):
    assert read(tokenizer, "one##", GatewayCall("chat", stop=("##",)), "length").text == "one##"


def test_message_has_all_that_was_returned(tokenizer):
    message = read(tokenizer, f"<think>hm</think>I add. {HERMES}", GatewayCall("chat", tools=[TOOL])).message()
    assert message["content"] == "I add." and message["reasoning_content"] == "hm"
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":1}'}


def test_bytes_of_tokens_add_up_to_the_text(tokenizer):
    text = "für 5 € 😀\n"
    pieces = [Vocabulary(tokenizer).token_bytes(token) for token in tokenizer.encode_text(text)]
    assert b"".join(pieces) == text.encode() and len(pieces) == len(text.encode())


def test_bytes_of_sentencepiece_tokens_keep_their_space(tmp_path):
    vocabulary = {"<unk>": 0, "</s>": 1, "▁to": 2, "day": 3, "<0xE2>": 4, "<0x82>": 5, "<0xAC>": 6}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    pieces = Vocabulary(TextTokenizer(tmp_path))
    assert b"".join(pieces.token_bytes(token) for token in (2, 3, 4, 5, 6)).decode() == " today€"


@pytest.mark.parametrize(("config", "size"), [('{"vocab_size": 300}', 300), ("{}", 257)])
def test_vocabulary_is_that_of_the_model(tokenizer, tmp_path, config, size):
    (tmp_path / "config.json").write_text(config)
    assert Vocabulary(tokenizer).size == size
