"""The trial's own copy of its data: when it is made, what is in it, and that it stays the same."""

import json
from pathlib import Path

import pytest

from realsys.config.schema import Config, DataConfig, EvalConfig
from realsys.config.schema_data import MixtureSource
from realsys.data.check import check_data
from realsys.data.convert import check_copy, check_prompts, convert, count_held_out, needs_copy, write_digest
from realsys.data.lines import code_tests_of
from realsys.data.prompts import PromptDataset, open_splits, split_sizes
from realsys.errors import ConfigError, DataError
from tests.support.data.data_rows import HUMANEVAL, MESSAGES, ROWS, SLIME, TEMPLATE, char_tokenizer, jsonl, trial


def config_of(train="", *, problems=0, seed=1, model="", **data):
    values = {"train": str(train), "eval_fraction": 0.0, **data}
    return Config(
        data=DataConfig(**values), evaluation=EvalConfig(problems=problems), seed=seed, model={"path": str(model)}
    )


def questions(count, start=0):
    return [{"question": f"a{i}=", "answer": f"so\n#### {i}"} for i in range(start, start + count)]


def prompts_of(config, paths, tokenizer, split="train"):
    dataset = PromptDataset(config, paths, tokenizer)
    return [dataset.prompt(split, i) for i in range(dataset.size(split))]


@pytest.fixture
def chars(tmp_path):
    return char_tokenizer(tmp_path / "model")


def test_own_layout_is_read_in_place(tmp_path):
    own = jsonl(tmp_path / "own.jsonl", [{"prompt": "a1=", "answer": "1"}])
    assert not needs_copy(config_of(own).data)
    assert not needs_copy(config_of(own, layout="realsys").data)
    assert not needs_copy(config_of(jsonl(tmp_path / "none.jsonl", [])).data)
    assert not needs_copy(config_of(own, eval=str(own)).data)


@pytest.mark.parametrize("name", sorted(set(ROWS) - {"realsys"}))
def test_other_layouts_are_copied(tmp_path, name):
    path = jsonl(tmp_path / "rows.jsonl", [ROWS[name]])
    assert needs_copy(config_of(path).data)
    convert(config_of(path), trial(tmp_path))
    assert split_sizes(config_of(path), trial(tmp_path)) == {"train": 1, "eval": 0}


def test_copied_rows_reach_the_rollout(tmp_path, chars):
    path = jsonl(tmp_path / "rows.jsonl", [SLIME, SLIME | {"prompt": "b"}])
    convert(config_of(path), trial(tmp_path))
    first, second = prompts_of(config_of(path), trial(tmp_path), chars)
    assert (first.text, first.answer) == (SLIME["prompt"], "18")
    assert second.extra == {"level": 2, "data_origin": f"{path}:2"}


def test_other_keys_pass_a_copy_unchanged(tmp_path, chars):
    other = {"level": None, "list": [1.5, None, True, {"a": "\u00e9\x00"}], "big": 2**100}
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "1", **other}])
    config = config_of(path, long_prompts="drop", model=chars.path)
    convert(config, trial(tmp_path))
    (prompt,) = prompts_of(config, trial(tmp_path), chars)
    assert prompt.extra == {**other, "data_origin": f"{path}:1"}


def test_code_tests_reach_the_verifier(tmp_path, chars):
    path = jsonl(tmp_path / "rows.jsonl", [HUMANEVAL])
    convert(config_of(path), trial(tmp_path))
    (prompt,) = prompts_of(config_of(path), trial(tmp_path), chars)
    assert code_tests_of(prompt.extra).function == "double"


def test_tools_reach_the_template(tmp_path):
    template = "{{ tools[0].function.name }}{% for m in messages %}{{ m.tool_calls is defined }}{% endfor %}"
    tokenizer = char_tokenizer(tmp_path / "model", template)
    path = jsonl(tmp_path / "rows.jsonl", [MESSAGES])
    convert(config_of(path), trial(tmp_path))
    (prompt,) = prompts_of(config_of(path), trial(tmp_path), tokenizer)
    assert tokenizer.decode(prompt.ids).startswith("weather") and prompt.extra["tools"] == MESSAGES["tools"]
    plain = char_tokenizer(tmp_path / "plain")
    with pytest.raises(DataError, match="has tools, but the model has no chat template"):
        PromptDataset(config_of(path), trial(tmp_path), plain).check()


def test_error_in_a_copy_names_the_source(tmp_path, chars):
    path = jsonl(tmp_path / "rows.jsonl", questions(3))
    convert(config_of(path), trial(tmp_path))
    with pytest.raises(DataError, match=rf"^{path}:1: the prompt has 4 tokens, but data.max_prompt_tokens is 3"):
        PromptDataset(config_of(path, max_prompt_tokens=3), trial(tmp_path), chars).check()


def test_long_prompts_are_left_out(tmp_path, chars):
    path = jsonl(tmp_path / "t.jsonl", [{"prompt": f"{'a' * n}=", "answer": "1"} for n in (1, 9, 2, 8, 3)])
    config = config_of(path, long_prompts="drop", max_prompt_tokens=8, model=chars.path)
    convert(config, trial(tmp_path))
    assert [p.text for p in prompts_of(config, trial(tmp_path), chars)] == ["a=", "aa=", "aaa="]
    warnings = check_data(config, trial(tmp_path), chars).warnings
    assert f"left out 2 of 5 rows of {path}: they have more than data.max_prompt_tokens" in warnings
    with pytest.raises(DataError, match="no prompts found"):
        convert(config_of(path, long_prompts="drop", max_prompt_tokens=1, model=chars.path), trial(tmp_path / "b"))


def mixture(tmp_path, *parts, **data):
    sources = [
        MixtureSource(path=str(jsonl(tmp_path / f"m{i}.jsonl", rows)), weight=weight)
        for i, (rows, weight) in enumerate(parts)
    ]
    return config_of(mixture=sources, **data)


def test_mixture_has_the_shares_of_its_weights(tmp_path, chars):
    config = mixture(tmp_path, (questions(20), 1.0), ([{"prompt": "b=", "answer": "1"}] * 5, 3.0))
    convert(config, trial(tmp_path))
    texts = [prompt.text for prompt in prompts_of(config, trial(tmp_path), chars)]
    assert len(texts) == 80 and texts.count("b=") == 60
    again = [prompt.text for prompt in prompts_of(config, trial(tmp_path), chars)]
    assert texts == again
    check_data(config, trial(tmp_path), chars)


def test_mixture_holds_out_before_it_repeats(tmp_path, chars):
    config = mixture(tmp_path, (questions(200), 1.0), (questions(50, 1000), 1.0), eval_fraction=0.2, problems=1)
    convert(config, trial(tmp_path))
    train = [prompt.text for prompt in prompts_of(config, trial(tmp_path), chars)]
    held = [prompt.text for prompt in prompts_of(config, trial(tmp_path), chars, "eval")]
    assert not set(train) & set(held) and len(held) == len(set(held))
    first = sum(int(text[1:-1]) < 1000 for text in train)
    assert first == len(train) - first


def test_held_out_prompts_leave_the_train_split(tmp_path, chars):
    """Also if they differ in case and spaces."""
    train = jsonl(tmp_path / "t.jsonl", [{"prompt": p, "answer": "1"} for p in ("a =", "A  =", "b =", "c")])
    held = jsonl(tmp_path / "e.jsonl", [{"prompt": "a =\n", "answer": "1"}])
    config = config_of(train, eval=str(held), problems=1)
    splits = open_splits(config, trial(tmp_path))
    assert splits.sizes() == {"train": 2, "eval": 1} and splits.leaked == 2
    assert (
        "left out 2 rows of data.train: their prompts are in data.eval"
        in check_data(config, trial(tmp_path), chars).warnings
    )
    with pytest.raises(DataError, match="every prompt is in data.eval, too"):
        split_sizes(config_of(train, eval=str(train), problems=1), trial(tmp_path))


def test_variants_of_a_prompt_share_their_side(tmp_path):
    rows = [{"prompt": text, "answer": "1"} for i in range(200) for text in (f"Q {i}", f"q  {i} ")]
    splits = open_splits(config_of(jsonl(tmp_path / "t", rows), eval_fraction=0.3, problems=1), trial(tmp_path))
    sides = [{lines[i].prompt.split()[1] for i in range(len(lines))} for lines in (splits.train, splits.eval)]
    assert not sides[0] & sides[1] and len(splits.eval) % 2 == 0


@pytest.mark.parametrize("fraction", [0.0, 0.2])
def test_held_out_are_counted_before_the_copy(tmp_path, fraction):
    path = jsonl(tmp_path / "t.jsonl", questions(100))
    held = {} if fraction else {"eval": str(jsonl(tmp_path / "e.jsonl", questions(7, 500)))}
    config = config_of(path, eval_fraction=fraction, problems=1, **held)
    counted = count_held_out(config, trial(tmp_path), 1000)
    assert count_held_out(config, trial(tmp_path), 3) == 3
    convert(config, trial(tmp_path))
    assert counted == split_sizes(config, trial(tmp_path))["eval"] == count_held_out(config, trial(tmp_path), 1000)


def test_source_may_vanish_after_the_copy(tmp_path, chars):
    path = jsonl(tmp_path / "t.jsonl", questions(5))
    config = config_of(path)
    convert(config, trial(tmp_path))
    before = [prompt.text for prompt in prompts_of(config, trial(tmp_path), chars)]
    path.unlink()
    assert [prompt.text for prompt in prompts_of(config, trial(tmp_path), chars)] == before
    check_copy(config, config, trial(tmp_path))


def test_copy_keeps_its_settings(tmp_path):
    path, other = jsonl(tmp_path / "t.jsonl", questions(5)), jsonl(tmp_path / "o.jsonl", questions(5))
    config = config_of(path)
    convert(config, trial(tmp_path))
    with pytest.raises(ConfigError, match=r"data.train=.*has its own copy of the data, made with .*t.jsonl"):
        check_copy(config_of(other), config, trial(tmp_path))
    check_copy(config_of(path, max_prompt_tokens=9), config, trial(tmp_path))
    own = config_of(jsonl(tmp_path / "own.jsonl", [{"prompt": "a", "answer": "1"}]))
    with pytest.raises(ConfigError, match="was begun with a file that is read in its place"):
        check_copy(config, own, trial(tmp_path / "b"))


def digest(config, paths, tokenizer):
    return PromptDataset(config, paths, tokenizer).check().digest


def test_changed_prompts_are_refused(tmp_path, chars):
    """A cursor means the same prompts only in the same order; their number alone does not show a change."""
    rows = [{"prompt": f"a{i}=", "answer": str(i)} for i in range(9)]
    path, paths = jsonl(tmp_path / "t.jsonl", rows), trial(tmp_path)
    config = config_of(path)
    write_digest(paths, digest(config, paths, chars))
    path.write_text(path.read_text().replace("\n", "\n\n").replace('"answer": "8"', '"answer": "a mended one"'))
    check_prompts(config, paths, digest(config, paths, chars))
    for changed in (rows[::-1], [*rows[:-1], {"prompt": "b8=", "answer": "8"}]):
        jsonl(path, changed)
        with pytest.raises(ConfigError, match="begun with other prompts, or in another order"):
            check_prompts(config, paths, digest(config, paths, chars))
    write_digest(paths, "0")
    assert (paths.data / "train.digest").read_text() != "0"


def test_resumed_trial_has_the_same_prompts(tmp_path, chars):
    path = jsonl(tmp_path / "t.jsonl", [{"prompt": f"a{i}=", "answer": "1"} for i in range(9)])
    first, second = trial(tmp_path / "first"), trial(tmp_path / "second")
    first.root.mkdir()
    config = config_of(path).model_copy(update={"resume": str(first.checkpoints / "step-2")})
    write_digest(first, "0" * 32)
    with pytest.raises(ConfigError, match="step-2 was trained with other prompts"):
        check_prompts(config, second, digest(config, second, chars))
    (first.data / "train.digest").write_text(digest(config, second, chars))
    check_prompts(config, second, digest(config, second, chars))


def test_mixture_of_other_weights_is_another_order(tmp_path, chars):
    parts = (questions(20), 1.0), (questions(5, 100), 1.0)
    config = mixture(tmp_path, *parts)
    convert(config, trial(tmp_path))
    first = digest(config, trial(tmp_path), chars)
    entry = json.loads(trial(tmp_path).data_sources.read_text())
    entry["train"][1]["weight"] = 2.0
    trial(tmp_path).data_sources.write_text(json.dumps(entry))
    assert digest(config, trial(tmp_path), chars) != first


def test_messages_of_a_copy_get_the_template(tmp_path):
    tokenizer = char_tokenizer(tmp_path / "model", TEMPLATE)
    path = jsonl(tmp_path / "t.jsonl", [{"messages": [{"role": "user", "content": "a"}], "label": 1}])
    convert(config_of(path), trial(tmp_path))
    (prompt,) = prompts_of(config_of(path), trial(tmp_path), tokenizer)
    assert prompt.answer == "1" and prompt.text == "a"


def test_layout_of_the_user_is_called(tmp_path, chars, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "docs/examples"))
    rows = [{"text": "Which is a prime?", "choices": ["8", "9", "11"], "answer": 2, "level": 1}]
    settings = {"layout": "layout:choices", "layout_args": {"question": "text"}}
    config = config_of(jsonl(tmp_path / "t.jsonl", rows), **settings)
    convert(config, trial(tmp_path))
    (prompt,) = prompts_of(config, trial(tmp_path), chars)
    assert (prompt.text.splitlines()[1:], prompt.answer) == (["A) 8", "B) 9", "C) 11"], "C")
    assert prompt.extra["level"] == 1
    bad = config_of(jsonl(tmp_path / "b.jsonl", [rows[0] | {"answer": 3}]), **settings)
    with pytest.raises(DataError, match=r"b\.jsonl:1: field 'answer': must be the number of one of the 3 choices"):
        convert(bad, trial(tmp_path / "bad"))


@pytest.mark.parametrize(
    ("body", "problem"),
    [("row['none']", "raised KeyError: 'none'"), ("'text'", "returned str: it must return a ProblemRow")],
)
def test_broken_layout_of_the_user_is_one_line(tmp_path, monkeypatch, body, problem):
    name = f"layout_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(f"def layout(row):\n    return {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = config_of(jsonl(tmp_path / "t.jsonl", [{"a": 1}]), layout=f"{name}:layout")
    with pytest.raises(DataError, match=rf"t\.jsonl:1: the layout {problem}"):
        convert(config, trial(tmp_path))
