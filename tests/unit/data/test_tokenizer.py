"""Character tokenizer, special tokens, chat templates."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.data.arith import write_char_tokenizer
from realsys.data.lines import Message
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import DataError, ModelError
from realsys.model_files.architecture import ALPHABET, BOS_ID, END_OF_TURN_ID, EOS_ID, vocabulary_size
from tests.support.data.data_rows import TEMPLATE, char_tokenizer


@pytest.fixture(scope="module")
def chars(tmp_path_factory):
    return char_tokenizer(tmp_path_factory.mktemp("model"))


@settings(max_examples=50, deadline=None)
@given(text=st.text(ALPHABET, min_size=1))
def test_alphabet_round_trips_one_token_per_character(chars, text):
    ids = chars.encode_prompt(text)
    assert ids[0] == BOS_ID and len(ids) == len(text) + 1
    assert chars.decode(ids[1:]) == text and ids[1:] == chars.encode_text(text)


def test_vocabulary_divides_by_four(chars):
    assert chars.vocab_size == vocabulary_size(chat=False) == 44
    assert chars.eos_token_ids == (EOS_ID,) and chars.eos_token_id == EOS_ID


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    write_char_tokenizer(folder, chat=True)
    return TextTokenizer(folder)


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_chat_form_loses_no_character(chat, text):
    ids = chat.encode_text(text)
    assert chat.decode(ids) == text and chat.encode_prompt(text, chat=False) == [BOS_ID, *ids]
    assert not chat.unknown(text)


def test_chat_form_shows_tools_by_name(chat):
    """A tool call and its result are single tokens around bytes; a system message comes before the names."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "end")]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"of": "3+5"}}}
    as_text = {**call, "function": {"name": "add", "arguments": '{"of": "3+5"}'}}
    start = "<|im_start|>system\ntools: add end<|im_end|>\n<|im_start|>user\na3b5=<|im_end|>\n<|im_start|>assistant\n"
    question = Message("user", "a3b5=")
    assert chat.render([question], tools=tools) == start
    assert chat.render([Message("system", "Sum."), question], tools=tools) == start.replace("tools", "Sum.\ntools")
    assert chat.render([Message("system", "Sum."), question]).startswith("<|im_start|>system\nSum.<|im_end|>\n")
    calls = [Message("assistant", None, [each]) for each in (call, as_text)]
    first, second = (chat.render([question, each, Message("tool", "8")], tools=tools) for each in calls)
    assert (
        first
        == second
        == (
            f'{start}<tool_call>{{"name": "add", "arguments": {{"of": "3+5"}}}}</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>8</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )
    )
    assert len(chat.encode_text("<tool_call></tool_call><tool_response></tool_response><|im_end|>")) == 5


def test_text_that_would_be_lost_is_refused(tmp_path, chat):
    """Dropped characters would change what the model sees; the data check only warns about those of prompts."""
    chat.check_text("Wie groß?\n\x07")
    plain = char_tokenizer(tmp_path, TEMPLATE)
    plain.check_text("a3b5= wrong")
    for text, shown in (("A", "'A'"), ("a\nb", r"'\\n'"), ("é é", "'é'")):
        with pytest.raises(DataError, match=f"loses 1 characters of the text: {shown}"):
            plain.check_text(text)
    question, reply = {"role": "user", "content": "a1="}, {"role": "assistant", "content": "#1"}
    plain.encode_chat([question])
    with pytest.raises(DataError, match="loses"):
        plain.encode_chat([{"role": "user", "content": "A"}])
    with pytest.raises(DataError, match="loses"):
        plain.encode_tail([question], reply, [{"role": "user", "content": "A"}], EOS_ID)


def test_chat_vocabulary_has_no_unused_id(chat):
    assert chat.vocab_size == vocabulary_size(chat=True) == 268
    assert chat.eos_token_ids[0] == END_OF_TURN_ID


def test_completion_text_drops_only_final_end_of_text(chars):
    fifteen = chars.encode_text("#15")
    assert chars.completion_text([*fifteen, EOS_ID]) == "#15"
    assert chars.completion_text(fifteen) == "#15"
    assert chars.completion_text([*fifteen, EOS_ID, EOS_ID]) == "#15<eos>"
    assert chars.completion_text([*fifteen[:2], BOS_ID, *fifteen[2:]]) == "#1<bos>5"  # not "#15"
    assert chars.completion_text([]) == ""


def test_many_prompts_are_encoded_as_one_by_one(chars):
    texts = ["a1b2=", "c3=", "a1b2c3d4e5="]
    assert chars.encode_prompts(texts) == [chars.encode_prompt(text) for text in texts]
    assert chars.encode_prompts([]) == []


def test_text_prompt_uses_template_by_default(tmp_path):
    tokenizer = char_tokenizer(tmp_path, TEMPLATE)
    ids = tokenizer.encode_prompt("a1=")
    assert tokenizer.decode(ids) == "<bos>user a1=<eos>assistant "
    assert tokenizer.decode(tokenizer.encode_prompt("a1=", chat=False)) == "<bos>a1="
    chat = [Message("user", "a1="), Message("assistant", "#1"), Message("user", "b2=")]
    expected = "<bos>user a1=<eos>assistant #1<eos>user b2=<eos>assistant "
    assert tokenizer.decode(tokenizer.encode_prompt(chat)) == expected
    assert tokenizer.encode_prompts(["a1=", chat]) == [ids, tokenizer.encode_prompt(chat)]
    with pytest.raises(DataError, match="chat_template is false"):
        tokenizer.encode_prompt(chat, chat=False)


def test_template_that_refuses_messages_is_data_error(tmp_path):
    tokenizer = char_tokenizer(tmp_path, TEMPLATE)
    with pytest.raises(DataError, match="no system"):
        tokenizer.encode_prompt([Message("system", "a"), Message("user", "b")])


def test_a_template_cannot_reach_outside_its_sandbox(tmp_path):
    tokenizer = char_tokenizer(tmp_path, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(DataError, match="unsafe"):
        tokenizer.encode_prompt("a")


def test_templates_with_transformers_extras_can_be_rendered(tmp_path):
    source = (
        "{%- for m in messages -%}{%- if loop.index > 1 -%}{%- break -%}{%- endif -%}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{%- endfor -%}{{ strftime_now('%%') }}"
    )
    (tmp_path / "chat_template.jinja").write_text(source.replace('"', "'"))
    tokenizer = char_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_prompt([Message("user", "ab"), Message("user", "c")])) == "ab"


def test_model_without_eos_is_refused(tmp_path):
    """A model with broken files is refused, too."""
    write_char_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match="no end-of-text token"):
        TextTokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    assert TextTokenizer(tmp_path).eos_token_ids == (7, 1)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    assert TextTokenizer(tmp_path).eos_token_ids == (1, 7)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    with pytest.raises(ModelError, match="eos_token '<end>' not found in tokenizer.json"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": "{% for"}))
    with pytest.raises(ModelError, match="chat template cannot be read"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        TextTokenizer(tmp_path)


def test_template_that_ends_turns_otherwise_is_a_warning(tmp_path):
    """A base model with the template of its instruct version: no completion would end where the template ends it."""
    write_char_tokenizer(tmp_path, chat=True)
    assert TextTokenizer(tmp_path).eos_warning == ""
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"eos_token": "<|im_end|>"', '"eos_token": "<eos>"'))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    assert "ends a turn with '<|im_end|>', but completions end with '<eos>'" in TextTokenizer(tmp_path).eos_warning


def test_token_beyond_the_vocabulary_is_refused(tmp_path):
    write_char_tokenizer(tmp_path)
    (last,) = TextTokenizer(tmp_path).encode_text("a")
    (tmp_path / "config.json").write_text(f'{{"vocab_size": {last}}}')
    tokenizer = TextTokenizer(tmp_path)
    assert tokenizer.encode_text("1") and tokenizer.encode_prompts(["1"])
    for encode in (tokenizer.encode_text, tokenizer.encode_prompt, lambda text: tokenizer.encode_prompts([text])):
        with pytest.raises(DataError, match=r"is beyond the vocabulary of the model"):
            encode("1a")


def test_marks_of_the_template_are_found(chat):
    assert chat.template_mark("<|im_start|>user\n3+4?<|im_end|>") == "<|im_start|>"
    assert chat.template_mark("3+4?") is None and chat.template_mark([Message("user", "<|im_end|>")]) is None


def test_end_of_text_that_differs_is_a_warning(tmp_path):
    write_char_tokenizer(tmp_path)
    assert TextTokenizer(tmp_path).eos_warning == ""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    warning = TextTokenizer(tmp_path).eos_warning
    assert "ends a text with '<eos>', generation_config.json with '<pad>', '<bos>'" in warning
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')
    assert TextTokenizer(tmp_path).eos_warning == "", "one of several may be the tokenizer's"
