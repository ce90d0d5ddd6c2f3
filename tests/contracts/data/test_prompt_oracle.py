"""The prompt of every row is that of ``transformers.apply_chat_template`` on the same row, or the row is refused."""

import json
import random

import msgspec
import pytest
import transformers

from realsys.data.convert import DataSource, rows_of
from realsys.data.lines import LineReader, Problem
from realsys.errors import DataError
from tests.support.conversations.template_models import CHATML, TEMPLATES, model_with
from tests.support.data.data_rows import jsonl

THINKS = CHATML.replace("(m.content or '')", "(m.reasoning_content or '') + (m.content or '')")
SHOWS_TOOLS = "{% if tools %}{{ tools|tojson + '\\n' }}{% endif %}" + THINKS
NAMED = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": SHOWS_TOOLS}]
ORACLES = {**{name: TEMPLATES[name] for name in ("chatml", "merges_tools", "alternates")}, "tools": SHOWS_TOOLS}


def draw(random_):
    """Return a row as published sets have them: null keys, reasoning, calls, tools with defaults."""

    def message(role):
        one = {"role": role, "content": random_.choice(["3+4?", "Wie groß?\n", "a  b", "x"])}
        if role == "assistant" and random_.random() < 0.5:
            one["reasoning_content"] = random_.choice(["So 7. ", None])
        if role == "assistant" and random_.random() < 0.4:
            arguments = {"a": random_.randrange(9), "of": ["x", {"y": None}]}
            one["tool_calls"] = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}]
        if random_.random() < 0.3:
            one |= {"name": None, "tool_calls": one.get("tool_calls"), "refusal": None, "weight": 1, "other": "x"}
        return one

    turns = [message(role) for _ in range(random_.randrange(3)) for role in ("user", "assistant")]
    if turns and "tool_calls" in turns[-1] and turns[-1]["tool_calls"]:
        turns.append({"role": "tool", "content": "8", "tool_call_id": "1"})
        turns.append(message("assistant"))
    row = {"prompt": [*turns, message("user")], "answer": "7"}
    if random_.random() < 0.3:
        row["prompt"].insert(0, {"role": "system", "content": "Add."})
    if random_.random() < 0.5:
        schema = {"type": "object", "properties": {"a": {"type": "integer", "default": random_.choice([None, 3])}}}
        row["tools"] = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    return row


def expected(tokenizer, row):
    """Return the prompt of transformers; None if the template refuses the row. A null key counts as absent."""
    messages = [{key: value for key, value in one.items() if value is not None} for one in row["prompt"]]
    try:
        return tokenizer.apply_chat_template(
            messages, tools=row.get("tools"), tokenize=False, add_generation_prompt=True
        )
    except Exception:
        return None


@pytest.mark.parametrize("name", sorted(ORACLES))
def test_prompt_is_that_of_transformers(tmp_path, name):
    ours = model_with(tmp_path, ORACLES[name])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    random_ = random.Random(f"prompts {name}")
    rows = [draw(random_) for _ in range(150)]
    file = jsonl(tmp_path / "rows.jsonl", rows)
    converted = [row for _, row in rows_of(DataSource(str(file)), "train")]
    in_place = [problem for _, _, problem in LineReader(Problem).scan(file)]
    compared = 0
    for row, read, problem in zip(rows, converted, in_place, strict=True):
        wanted = expected(theirs, row)
        for one in (read, problem):
            try:
                rendered = ours.render(one.prompt, tools=one.tools)
            except DataError:
                assert wanted is None, row
                continue
            assert wanted in (rendered, None), row
            compared += wanted is not None
    assert compared > 30


def test_named_template_shows_the_tools(tmp_path):
    model_with(tmp_path, CHATML)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    tools = [{"type": "function", "function": {"name": "add"}}]
    for in_files in (False, True):
        if in_files:
            (tmp_path / "additional_chat_templates").mkdir()
            (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(SHOWS_TOOLS)
        named = CHATML if in_files else NAMED
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": named}))
        if in_files:
            (tmp_path / "chat_template.jinja").write_text(CHATML)
        ours = type(model_with(tmp_path / "other", CHATML))(tmp_path)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        for given in ((), tools):
            row = {"prompt": [{"role": "user", "content": "q"}], "tools": list(given) or None}
            assert ours.render("q", tools=given) == expected(theirs, row)
        assert "add" in ours.render("q", tools=tools)


def test_row_survives_its_copy(tmp_path):
    """What a trial writes into its own file is read back as it was."""
    rows = [draw(random.Random(number)) for number in range(50)]
    file = jsonl(tmp_path / "rows.jsonl", rows)
    for (_, row), (_, _, direct) in zip(
        rows_of(DataSource(str(file)), "train"), LineReader(Problem).scan(file), strict=True
    ):
        line = msgspec.json.encode(row.line())
        assert LineReader(Problem).decode(file, 2, line) == direct
