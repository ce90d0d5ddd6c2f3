"""Rows to learn from: layouts of ``data.demos``, their tokens and loss masks, held-out lines, limits."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.config.schema import Config
from realsys.config.schema_data import HELD_OUT, TRAIN
from realsys.data.arith import write_char_tokenizer
from realsys.data.check import check_data
from realsys.data.convert import check_copy, convert
from realsys.data.learning import LearningData, learning_data
from realsys.data.lines import Message
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import ConfigError, DataError
from tests.support.conversations.template_models import TEMPLATES, model_with, published_templates
from tests.support.data.data_rows import char_tokenizer, jsonl, trial

ASK = {"role": "user", "content": "3+5?"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"of": "3+5"}}}
CHAT = [ASK, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "8"}]
CHAT += [{"role": "assistant", "content": "It is 8."}, {"role": "user", "content": "Sure?"}]
CHAT += [{"role": "assistant", "content": "Yes."}]


def say(text):
    return {"role": "assistant", "content": text}


def learned(rows, tokenizer):
    """Return the text of each run of tokens with loss, of each row."""
    runs = []
    for row in rows:
        assert len(row.tokens) == len(row.loss_mask) and not row.loss_mask[0] and row.loss_mask[-1]
        own, before = [], False
        for token, mask in zip(row.tokens, row.loss_mask, strict=True):
            if mask and not before:
                own.append([])
            if mask:
                own[-1].append(token)
            before = mask
        runs.append([tokenizer.decode(run) for run in own])
    return runs


@pytest.fixture(scope="module")
def chars(tmp_path_factory):
    return char_tokenizer(tmp_path_factory.mktemp("chars"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    write_char_tokenizer(folder, chat=True)
    return TextTokenizer(folder)


def opened(tmp_path, records, tokenizer, rows="demonstrations", **more):
    return LearningData(jsonl(tmp_path / "d", records), tokenizer, rows=rows, **more)


def test_demonstrations_end_with_the_end_of_text_token(tmp_path, chars):
    demos = opened(tmp_path, [{"prompt": "a1b2=", "response": "a0+1=1;b1+2=3;#3"}], chars)
    (row,) = demos.rows(TRAIN, 0)
    prompt = chars.encode_prompt("a1b2=")
    assert row.tokens == [*prompt, *chars.encode_text("a0+1=1;b1+2=3;#3"), chars.eos_token_id]
    assert row.loss_mask == [False] * len(prompt) + [True] * 17 and demos.size(TRAIN) == 1
    demos.check(longest=23, prompt=6, response=17)
    for limits, problem in (
        ({"response": 16}, "the response has 17 tokens, but generation.sampling.max_new_tokens is 16"),
        ({"prompt": 5}, "the prompt has 6 tokens, but data.max_prompt_tokens is 5"),
        ({"longest": 22}, "the row has 23 tokens, but train.microbatch_tokens is 22"),
    ):
        with pytest.raises(DataError, match=f"{tmp_path}/d:1: {problem}"):
            demos.check(**{"longest": 23, **limits})


def test_every_turn_of_the_assistant_is_learned(tmp_path, chat):
    (row,) = opened(tmp_path, [{"messages": CHAT, "tools": TOOLS}], chat).rows(TRAIN, 0)
    text = chat.render([Message.read(message) for message in CHAT[:-1]], tools=TOOLS)
    assert chat.decode(row.tokens) == text + "Yes.<|im_end|>"
    call = '<tool_call>{"name": "add", "arguments": {"of": "3+5"}}</tool_call><|im_end|>'
    assert learned([row], chat) == [[call, "It is 8.<|im_end|>", "Yes.<|im_end|>"]]


def test_chat_of_one_turn_is_a_demonstration(tmp_path, chat):
    """Rollouts have the same tokens, so a model that was trained on either sees what it knows."""
    rows = [{"messages": [ASK, say("It is 8.")]}, {"prompt": "3+5?", "response": "It is 8."}]
    demos = opened(tmp_path, rows, chat)
    assert demos.rows(TRAIN, 0) == demos.rows(TRAIN, 1)


PAIRS = [
    {"prompt": "3+5?", "chosen": "8", "rejected": "9"},
    {"prompt": [ASK], "chosen": [say("8")], "rejected": [say("9")]},
    {"prompt": [ASK], "chosen": "8", "rejected": [say("9")]},
    {"chosen": [ASK, say("8")], "rejected": [ASK, say("9")]},
    {"prompt": "3+5?", "chosen": [ASK, say("8")], "rejected": [ASK, say("9")]},
]


def test_layouts_of_a_pair_have_the_same_rows(tmp_path, chat):
    pairs = opened(tmp_path, PAIRS, chat, "preferences")
    first = pairs.rows(TRAIN, 0)
    assert learned(first, chat) == [["8<|im_end|>"], ["9<|im_end|>"]]
    assert all(pairs.rows(TRAIN, i) == first for i in range(len(PAIRS)))
    length = sum(len(row.tokens) for row in first)
    pairs.check(longest=length)
    with pytest.raises(DataError, match=f"d:1: the two rows have {length} tokens, but train.microbatch_tokens"):
        pairs.check(longest=length - 1)


def test_turns_that_a_pair_shares_have_no_loss(tmp_path, chat):
    pair = {"chosen": CHAT, "rejected": [*CHAT[:3], say("It is 9.")], "tools": TOOLS}
    rows = opened(tmp_path, [pair], chat, "preferences").rows(TRAIN, 0)
    assert learned(rows, chat) == [["It is 8.<|im_end|>", "Yes.<|im_end|>"], ["It is 9.<|im_end|>"]]


@pytest.mark.parametrize(
    ("rows", "record", "problem"),
    [
        ("demonstrations", {"prompt": "a"}, "response is empty"),
        ("demonstrations", {"response": "a"}, "prompt is empty"),
        ("demonstrations", {"messages": [ASK]}, "messages has no response of the assistant"),
        ("demonstrations", {"messages": [ASK, say("")]}, "messages has an empty message of the assistant"),
        ("demonstrations", {"messages": [ASK, {"role": "user"}, say("a")]}, "message 2 of messages has no content"),
        ("demonstrations", {"messages": [ASK, say("a")], "response": "a"}, "messages and response are both there"),
        ("demonstrations", PAIRS[0], "response is empty"),
        ("preferences", {"prompt": "a", "response": "b"}, "missing required field `chosen`"),
        ("preferences", {"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
        ("preferences", {"prompt": "a", "chosen": "b", "rejected": ""}, "rejected is empty"),
        ("preferences", {"chosen": "a b", "rejected": "a c"}, "prompt is empty"),
        ("preferences", {"chosen": [ASK, say("a")], "rejected": [ASK]}, "rejected has no response"),
        ("preferences", {"chosen": [ASK, say("a")], "rejected": [CHAT[4], say("b")]}, "have different prompts"),
        ("preferences", {**PAIRS[3], "prompt": "4+5?"}, "do not begin with prompt"),
        ("preferences", {"chosen": [say("a")], "rejected": [say("b")]}, "prompt has no messages"),
    ],
)
def test_line_that_cannot_be_learned_is_named(tmp_path, chat, rows, record, problem):
    good = PAIRS[0] if rows == "preferences" else {"prompt": "a", "response": "b"}
    with pytest.raises(DataError, match=rf"d:2: .*({problem}).*; a line must be \{{"):
        opened(tmp_path, [good, record], chat, rows)


def test_row_that_the_template_cannot_show_is_named(tmp_path, chars):
    for record, problem in (
        ({"messages": [ASK, say("8")]}, "the row is a chat, but the model has no chat template"),
        ({"prompt": [ASK], "response": "8"}, "the prompt is a list of messages, but the model has no"),
    ):
        with pytest.raises(DataError, match=f"d:2: {problem}"):
            opened(tmp_path, [{"prompt": "a1=", "response": "#1"}, record], chars).check(longest=100)
    ends = model_with(tmp_path / "m", TEMPLATES["chatml"])
    with pytest.raises(DataError, match=r"d:1: message 2 has '<\|im_end\|>' in its content"):
        opened(tmp_path, [{"messages": [ASK, say("a<|im_end|>b")]}], ends).check(longest=100)
    equal = {"chosen": [ASK, say("a")], "rejected": [ASK, {**say("a"), "name": "b"}]}
    with pytest.raises(DataError, match="d:1: chosen and rejected have the same tokens"):
        opened(tmp_path, [equal], ends, "preferences").check(longest=100)


def test_template_without_the_tokens_of_a_turn_is_refused(tmp_path):
    """It shows no thinking of earlier turns, so the row would not have the tokens that the turn was written with."""
    tokenizer = model_with(tmp_path / "m", TEMPLATES["strips_thinking"])
    demos = opened(tmp_path, [{"messages": [ASK, say("<think>so</think>8"), CHAT[4], say("Yes.")]}], tokenizer)
    with pytest.raises(DataError, match=r"d:1: chat template of .* prints message 2 in another way"):
        demos.check(longest=1000)


def test_equal_prompts_are_on_one_side(tmp_path, chars):
    rows = [{"prompt": f"a{i % 50}=", "response": f"#{i}"} for i in range(100)]
    demos = opened(tmp_path, rows, chars, held_out=0.3)
    sides = [{rows_of(demos, split, i) for i in range(demos.size(split))} for split in (TRAIN, HELD_OUT)]
    assert demos.size(TRAIN) + demos.size(HELD_OUT) == 100 and 10 < demos.size(HELD_OUT) < 60
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 50
    whole = opened(tmp_path, rows, chars)
    assert (whole.size(TRAIN), whole.size(HELD_OUT)) == (100, 0)
    with pytest.raises(DataError, match="no demonstrations found: all 100 are held out: lower data.eval_fraction"):
        opened(tmp_path, rows, chars, held_out=1.0)


def rows_of(demos, split, index):
    (row,) = demos.rows(split, index)
    return tuple(token for token, mask in zip(row.tokens, row.loss_mask, strict=True) if not mask)


def test_file_is_opened_as_the_dataflow_reads_it(tmp_path, chat):
    path = jsonl(tmp_path / "d", [{**PAIRS[0], "prompt": f"{i}+5?", "response": "x"} for i in range(100)])

    def opened_for(algorithm, demos=str(path)):
        settings = {"train": {"ppo": {"algorithm": algorithm}}, "data": {"demos": demos, "eval_fraction": 0.3}}
        return learning_data(Config.model_validate(settings), trial(tmp_path), chat)

    warmup, sft, dpo = (opened_for(algorithm) for algorithm in ("ppo", "sft", "dpo"))
    assert (warmup.size(TRAIN), warmup.size(HELD_OUT)) == (100, 0), "the warm-up imitates every line, in any case"
    assert sft.size(HELD_OUT) == dpo.size(HELD_OUT) > 0
    assert len(sft.rows(TRAIN, 0)) == 1 and len(dpo.rows(TRAIN, 0)) == 2
    with pytest.raises(ConfigError, match=r"data\.demos.*train\.ppo\.algorithm=dpo: name a file of preferences"):
        opened_for("dpo", "")


# ---- loss masks against the chat template

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<>|"), min_size=1, max_size=12).filter(str.strip)


@st.composite
def chats(draw):
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(TEXT)})
        if draw(st.booleans()):
            messages += [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": draw(TEXT)}]
        messages.append(say(draw(TEXT)))
    return messages


@settings(max_examples=60, deadline=None)
@given(messages=chats())
def test_loss_is_on_the_turns_of_the_assistant_alone(chat, messages):
    """The oracle cuts the text at the marks of the template, which no message contains."""
    given_messages = [Message.read(message) for message in messages]
    ids, mask = chat.encode_turns(given_messages)
    text = chat.decode(ids)
    assert chat.render(given_messages) == text + "\n<|im_start|>assistant\n"
    assert ids == chat.encode_text(text)
    turns = [part.removeprefix("assistant\n") for part in text.split("<|im_start|>") if part.startswith("assistant\n")]
    masked = chat.decode([token for token, own in zip(ids, mask, strict=True) if own])
    assert masked == "".join(turn.rstrip("\n") if turn.endswith(">\n") else turn for turn in turns)


ROUNDS = [Message("user", "one"), Message("assistant", "two"), Message("user", "three"), Message("assistant", "four")]


REFUSED = ("numbers_turns", "strips_thinking")  # they open a completion in another way than they print it


@pytest.mark.parametrize("name", sorted({**TEMPLATES, **published_templates()}))
def test_masks_follow_the_template_or_it_is_refused(tmp_path, name):
    tokenizer = model_with(tmp_path, {**TEMPLATES, **published_templates()}[name])
    try:
        ids, mask = tokenizer.encode_turns(ROUNDS)
    except DataError as error:
        assert "chat template of" in str(error) and (name in REFUSED or name not in TEMPLATES)
        return
    texts = [tokenizer.decode([token]) for token in ids]
    own = "".join(text for text, masked in zip(texts, mask, strict=True) if masked)
    rest = "".join(text for text, masked in zip(texts, mask, strict=True) if not masked)
    assert "two" in own and "four" in own and "one" not in own and "three" not in own
    assert "one" in rest and "three" in rest and "two" not in rest and "four" not in rest
    assert ids[-1] in tokenizer.eos_token_ids and mask[-1] and name not in REFUSED


# ---- before the start of a run


def supervised(tmp_path, demos, algorithm="dpo", **data):
    train = {"ppo": {"algorithm": algorithm}, "microbatch_tokens": 1000}
    data = {"train": str(jsonl(tmp_path / "t", [{"prompt": "1=", "answer": "1"}])), "demos": str(demos), **data}
    return Config.model_validate({"train": train, "evaluation": {"problems": 0}, "data": data})


def test_check_counts_and_identifies_rows(tmp_path, chat):
    """A run that goes on knows a row by its number alone, so its digest must tell other rows and another order."""
    rows = [{**PAIRS[0], "prompt": f"{i}+5?"} for i in range(40)]
    checked = [
        check_data(supervised(tmp_path, jsonl(tmp_path / f"d{i}", given), eval_fraction=0.2), trial(tmp_path), chat)
        for i, given in enumerate((rows, rows, rows[::-1]))
    ]
    first, same, other = (check.digest for check in checked)
    assert first == same != other and 0 < checked[0].sizes["demos"] < 40
    assert checked[0].warnings[-1].startswith("there are fewer rows in data.demos to train on")
    few = check_data(supervised(tmp_path, jsonl(tmp_path / "few", rows[:1])), trial(tmp_path), chat)
    assert few.warnings[-1].startswith("data.eval_fraction=0.05 holds out none of 1 rows of data.demos")
    long = jsonl(tmp_path / "long", [*rows, {**rows[0], "chosen": "8" * 1000}])
    with pytest.raises(DataError, match=r"long:41: the two rows have 10\d\d tokens, but train.microbatch_tokens is"):
        check_data(supervised(tmp_path, long), trial(tmp_path), chat)


def test_table_is_copied_and_its_rows_are_named(tmp_path, chat):
    """Null entries, which a table adds to give all rows the same keys, count as absent."""
    file, paths = tmp_path / "pairs.json", trial(tmp_path / "trial")
    padded = [{**message, "tool_calls": None} for message in PAIRS[3]["chosen"]]
    file.write_text(json.dumps([{**PAIRS[3], "prompt": None, "chosen": padded}, {**PAIRS[3], "rejected": [ASK]}]))
    config = supervised(tmp_path, file)
    convert(config, paths)
    with pytest.raises(DataError, match=r"pairs.json:row 2: rejected has no response"):
        learning_data(config, paths, chat)
    file.write_text(json.dumps([{**PAIRS[3], "prompt": None, "chosen": padded}, {**PAIRS[0], "prompt": "8" * 900}]))
    convert(config, paths)
    file.unlink()
    data = learning_data(config, paths, chat)
    assert learned(data.rows(TRAIN, 0), chat) == [["8<|im_end|>"], ["9<|im_end|>"]]
    with pytest.raises(DataError, match=r"pairs.json:row 2: the two rows have 18\d\d tokens"):
        check_data(config, paths, chat)
    other = supervised(tmp_path, tmp_path / "other.jsonl")
    with pytest.raises(ConfigError, match=r"data\.demos.*has its own copy of"):
        check_copy(other, config, paths)
