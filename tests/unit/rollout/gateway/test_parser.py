"""Tool calls and reasoning of several formats, with and without single tokens for their markers."""

import json
import random
import re

import msgspec
import pytest

from realsys.errors import ConfigError
from realsys.rollout.gateway import parser as parser_module
from realsys.rollout.gateway.parser import formats, parser_of
from tests.support.conversations.template_models import published_templates
from tests.support.gateway.replies import TOOL
from tests.support.gateway.tokenizers_of_formats import COMPLETIONS, byte_tokenizer, markers_of

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
QWEN = '{{ messages }}<tool_call> "arguments" <think>'


def parsed(tokenizer, text, name="auto", reasoning="auto", tools=(TOOL,), prompt=""):
    tokens = [*tokenizer.encode_text(text), tokenizer.eos_token_id]
    return parser_of(tokenizer, name, reasoning).parse(tokens, tools, tokenizer.encode_text(prompt))


@pytest.mark.parametrize("single", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", COMPLETIONS)
def test_format_is_parsed(tmp_path, name, single):
    """A model whose tokenizer spells the markers with several tokens is parsed as well."""
    text = COMPLETIONS[name]
    tokenizer = byte_tokenizer(tmp_path, markers_of(text) if single else [])
    assert single == (len(tokenizer.encode_text("<think>")) == 1)
    found = parsed(tokenizer, text, name)
    assert (found.content, found.reasoning) == ("hello", "hm")
    assert [(function, arguments) for _, function, arguments in found.calls] == [("add", {"a": 1})]


@pytest.mark.parametrize("single", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", COMPLETIONS)
def test_calls_stay_in_content_without_tools(tmp_path, name, single):
    text = COMPLETIONS[name]
    tokenizer = byte_tokenizer(tmp_path, markers_of(text) if single else [])
    found = parsed(tokenizer, text, name, tools=())
    assert found.calls == [] and found.reasoning == "hm"
    assert found.content == text[text.index("hello") :]


@pytest.mark.parametrize("single", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize(
    "broken",
    [
        'hello <tool_call>\n{"name": "add", "arguments": \n</tool_call>',
        'hello <tool_call>\n{"name": "add", "arguments": {"a": 1}}',
        'hello <tool_call>\n{"arguments": {"a": 1}}\n</tool_call>',
        'hello <tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
        'hello <tool_call>\n{"name": "add", "arguments": "1"}\n</tool_call>',
        "hello <tool_call>\n5\n</tool_call>",
    ],
)
def test_malformed_call_stays_in_content(tmp_path, broken, single):
    tokenizer = byte_tokenizer(tmp_path, ["<tool_call>", "</tool_call>"] if single else [])
    found = parsed(tokenizer, broken, "qwen3")
    assert (found.content, found.calls) == (broken, [])


def test_good_call_beside_malformed_one_is_returned(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, [])
    broken = "<tool_call>\n{\n</tool_call>"
    found = parsed(tokenizer, f"hello {HERMES}\n{broken}", "qwen3")
    assert len(found.calls) == 1 and found.content == "hello" + broken


def test_spelled_marker_of_vocabulary_is_text(tmp_path):
    """Ordinary tokens that spell a marker are text if the tokenizer has the marker as a token."""
    tokenizer = byte_tokenizer(tmp_path, ["<tool_call>", "</tool_call>"])
    spelled = [token for character in HERMES for token in tokenizer.encode_text(character)]
    found = parser_of(tokenizer, "qwen3").parse(spelled, [TOOL])
    assert (found.content, found.calls) == (HERMES, [])


@pytest.mark.parametrize("name", ["qwen3", "none"])
@pytest.mark.parametrize("single", [True, False], ids=["tokens", "text"])
def test_reasoning_that_the_prompt_opened_is_found(tmp_path, name, single):
    tokenizer = byte_tokenizer(tmp_path, ["<|im_start|>", "<think>", "</think>"] if single else [], QWEN)
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    found = parsed(tokenizer, "hm</think>five", name, prompt=prompt)
    assert (found.reasoning.strip(), found.content.strip()) == ("hm", "five")
    closed = parsed(tokenizer, "five", name, prompt=prompt + "</think>\n")
    assert (closed.reasoning, closed.content) == (None, "five")


def test_reasoning_that_was_cut_off_is_no_content(tmp_path):
    found = parsed(byte_tokenizer(tmp_path, []), "<think>\nhm", "qwen3")
    assert (found.reasoning.strip(), found.content) == ("hm", "")


def test_reasoning_stays_in_content_if_not_wanted(tmp_path):
    found = parsed(byte_tokenizer(tmp_path, []), COMPLETIONS["qwen3"], "qwen3", "none")
    assert (found.content, found.reasoning) == ("<think>\nhm\n</think>\n\nhello", None) and len(found.calls) == 1


def test_end_of_text_is_never_content(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, [])
    for name in ("none", "qwen3", "llama-3"):
        assert parsed(tokenizer, "five", name).content == "five"


@pytest.mark.parametrize("single", [True, False], ids=["token", "text"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "llama-3"])
def test_text_after_a_stop_token_is_content(tmp_path, name, single):
    """The model does not stop there, so these tokens are trained: the agent has to see them."""
    stop = "<|eot_id|>" if name == "llama-3" else "<|endoftext|>"
    tokenizer = byte_tokenizer(tmp_path, [stop] if single else [])
    found = parsed(tokenizer, f"five{stop}six", name)
    assert (found.content, found.reasoning, found.calls) == (f"five{stop}six", None, [])


def test_parser_keeps_nothing_of_earlier_completions(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, [])
    parser = parser_of(tokenizer, "qwen3")
    first = tokenizer.encode_text(f"one {HERMES}")
    results = [parser.parse(tokens, [TOOL]) for tokens in (first, tokenizer.encode_text("two"), first)]
    assert [found.content for found in results] == ["one", "two", "one"] and results[0] == results[2]


@pytest.mark.parametrize(
    ("template", "name", "reasoning"),
    [
        ("", "none", "none"),
        ("{{ messages }}", "none", "none"),
        ("<think>", "none", "think"),
        (QWEN, "qwen3", "think"),
        ("<tool_call> <function= <think>", "qwen3.5", "think"),
        ("[gMASK] <arg_key>", "glm-4.5", "think"),
        ('<|start_header_id|> "parameters"', "llama-3", "think"),
    ],
)
def test_format_is_chosen_by_the_template(tmp_path, template, name, reasoning):
    parser = parser_of(byte_tokenizer(tmp_path, [], template))
    assert (parser.format, parser.reasoning) == (name, reasoning)


@pytest.mark.needs(package="trl")
def test_published_templates_get_their_formats(tmp_path):
    expected = {"qwen2_5": "qwen3", "qwen3": "qwen3", "qwen3_6": "qwen3.5", "glm4moe": "glm-4.5", "llama3_1": "llama-3"}
    expected |= {"gemma4": "gemma4", "deepseekv3": "deepseek-r1", "phi3": "none", "cohere2": "none"}
    templates = published_templates()
    found = {name: parser_of(byte_tokenizer(tmp_path, [], templates[name])).format for name in expected}
    assert found == expected


@pytest.mark.parametrize(
    ("field", "names"), [("tool_format", ["hermes", "auto"]), ("reasoning_format", ["auto", "r1"])]
)
def test_unknown_format_is_refused_with_the_known_ones(tmp_path, field, names):
    with pytest.raises(ConfigError, match="choose one of auto, none") as caught:
        parser_of(byte_tokenizer(tmp_path, []), *names)
    assert caught.value.field == f"rollout.gateway.{field}"


def test_formats_are_those_of_the_library():
    assert {"auto", "none", "qwen3", "qwen3.5", "gpt-oss", "llama-3", "kimi-k2"} <= set(formats())
    assert "default" not in formats()


@pytest.mark.parametrize(
    "arguments",
    ['{"a": "\\ud800"}', '{"\\ud800": 1}', '{"a": NaN}', '{"a": 1e400}', '{"a": -Infinity}']
    + [f'{{"a": {value}}}' for value in ("9" * 4400, "[" * 1200, "[" * 1200 + "]" * 1200, "[" * 300 + "]" * 300)],
    ids=["surrogate", "key", "nan", "huge", "infinity", "digits", "open", "nested", "deep"],
)
def test_call_that_json_cannot_write_stays(tmp_path, arguments):
    tokenizer = byte_tokenizer(tmp_path, ["<tool_call>", "</tool_call>"])
    text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    found = parsed(tokenizer, text, "qwen3")
    assert (found.content, found.calls, found.malformed) == (text, [], 1)


@pytest.mark.parametrize("single", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", COMPLETIONS)
def test_any_sampled_text_is_parsed(tmp_path, name, single):
    """Every text gets a reply that every client can read."""
    text, choose = COMPLETIONS[name], random.Random(name)
    odd = ["x", "9" * 5000, "1e999", "NaN", "\\ud800", "[", "]]]", '"', '{"name": 5}', '{"a":' + "[" * 3000, "-", "{"]
    parts = [part for part in re.split(r"(<[^<>]*>|[{}\[\]\":,\n ])", text) if part]
    tokenizer = byte_tokenizer(tmp_path, markers_of(text) if single else [])
    parser = parser_of(tokenizer, name)
    for _ in range(60):
        sample = list(parts)
        for _ in range(choose.randint(1, 3)):
            sample[choose.randrange(len(sample))] = choose.choice([*odd, choose.choice(parts)])
        tokens = [*tokenizer.encode_text("".join(sample)), tokenizer.eos_token_id][: choose.choice([40, None])]
        found = parser.parse(tokens, choose.choice([(), (TOOL,)]))
        json.loads(msgspec.json.encode([found.content, found.reasoning, found.calls]))


def test_renderers_of_template_arguments_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(parser_module, "MOST_RENDERERS", 2)
    tokenizer = byte_tokenizer(tmp_path, [])
    parser = parser_of(tokenizer, "qwen3")
    for value in range(5):
        parser.parse(tokenizer.encode_text("a"), options={"enable_thinking": value})
    assert len(parser._renderers) == 2
