"""Datasets from files: splits, bad lines, limits."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.config.schema import Config, DataConfig, EvalConfig, WarmupConfig
from realsys.config.schema_data import EvalSetConfig
from realsys.config.schema_train import TrainConfig
from realsys.data.check import SIMILAR, NearDuplicates, check_data, shingles
from realsys.data.convert import check_copy, convert_sets, count_held_out
from realsys.data.prompts import (
    PromptDataset,
    copies_in_epoch,
    dataset_files,
    epoch_of_mixture,
    open_splits,
    split_sizes,
)
from realsys.errors import ConfigError, DataError
from realsys.manager.ledger.prompt_order import PromptOrder
from realsys.rollout.check_references import check_references
from tests.support.data.data_rows import GSM8K, char_tokenizer, jsonl, trial


def jsonl_config(train, *, evaluate=None, problems=1, **data):
    settings = {"train": str(train), "eval": str(evaluate or ""), **data}
    return Config(data=DataConfig(kind="jsonl", **settings), evaluation=EvalConfig(problems=problems))


def count_rows(path):
    return split_sizes(jsonl_config(path, eval_fraction=0.0, problems=0), trial(path.parent))["train"]


def problems(count, start=0):
    return [{"prompt": f"q{i}=", "answer": str(i)} for i in range(start, start + count)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("not json", "malformed"),
        ('{"prompt": "a"}', "missing required field `answer`"),
        ('{"prompt": "a", "answer": 5}', "Expected `str`, got `int`"),
        ('{"prompt": 5, "answer": "5"}', "Expected `str | array`, got `int`"),
        ('{"prompt": " ", "answer": "5"}', "prompt is empty"),
        ('{"prompt": "a", "answer": ""}', "answer is empty"),
        ('{"prompt": [], "answer": "5"}', "prompt has no messages"),
        ('{"prompt": [{"role": "robot", "content": "a"}], "answer": "5"}', "Invalid enum value 'robot'"),
        ('{"prompt": [{"role": "assistant", "content": "a"}], "answer": "5"}', "it must be 'user'"),
        ('["a", "5"]', "Expected `object`, got `array`"),
        # bytes that are no UTF-8, also under other keys
        ('{"prompt": "\udcff", "answer": "2"}', "utf-8"),
        ('{"prompt": "a1=", "answer": "1", "source": "\udcff"}', "utf-8"),
    ],
)
def test_bad_row_is_named_by_file_and_line(tmp_path, line, expected):
    path = tmp_path / "bad.jsonl"
    text = '{"prompt": "a", "answer": "1"}\n\n' + line + '\n{"prompt": "b", "answer": "2"}\n'
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError) as caught:
        count_rows(path)
    assert str(caught.value).startswith(f"{path}:3: ") and expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        count_rows(tmp_path / "none.jsonl")


def test_blank_lines_bom_and_unknown_keys_are_accepted(tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": "1", "source": "x"}\r\n\n  \n{"prompt":"b","answer":"2"}')
    assert count_rows(path) == 2


def test_other_keys_arrive_with_their_prompt(tmp_path):
    rows = [
        {
            "prompt": "a1=",
            "answer": "1",
            "level": 3,
            "extra": {"prompt": "b"},
            "tests": [{"in": None}, 1.0, True, "\u00e9\x00"],
        },
        {"big": 2**100, "answer": "2", "prompt": "a2=", "source": ""},
        {"prompt": "a3=", "answer": "3"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "".join(json.dumps(row) + "\n" for row in rows).encode())
    config = jsonl_config(path, eval_fraction=0.0, problems=0)
    dataset = PromptDataset(config, trial(tmp_path), char_tokenizer(tmp_path / "model"))
    for index, row in enumerate(rows):
        prompt = dataset.prompt("train", index)
        others = {key: value for key, value in row.items() if key not in ("prompt", "answer")}
        assert (prompt.text, prompt.answer, prompt.extra) == (row["prompt"], row["answer"], others)
        assert list(map(type, prompt.extra.values())) == list(map(type, others.values()))


def test_each_prompt_has_one_split_and_its_index(tmp_path):
    tokenizer = char_tokenizer(tmp_path / "model")
    train = jsonl(tmp_path / "train.jsonl", problems(300))
    dataset = PromptDataset(jsonl_config(train, eval_fraction=0.2), trial(tmp_path), tokenizer)
    seen = [dataset.prompt(split, i) for split in ("train", "eval") for i in range(dataset.size(split))]
    assert sorted(int(p.answer) for p in seen) == list(range(300))
    assert all(p.text == f"q{p.answer}=" and p.ids == tokenizer.encode_prompt(p.text) for p in seen)
    assert 30 <= dataset.size("eval") <= 90
    assert split_sizes(jsonl_config(train, eval_fraction=0.2), trial(tmp_path)) == {
        "train": dataset.size("train"),
        "eval": dataset.size("eval"),
    }


def test_the_hold_out_depends_on_the_prompt_alone(tmp_path):
    tokenizer = char_tokenizer(tmp_path / "model")

    def held_out(name, records):
        config = jsonl_config(jsonl(tmp_path / name, records), eval_fraction=0.2)
        dataset = PromptDataset(config, trial(tmp_path), tokenizer)
        return {dataset.prompt("eval", i).text for i in range(dataset.size("eval"))}

    few, more = held_out("few", problems(100)), held_out("more", problems(50, 200) + problems(100) + problems(100))
    assert few == {text for text in more if int(text[1:-1]) < 100}


def test_evaluation_file_leaves_all_train_rows_for_training(tmp_path):
    train, held = jsonl(tmp_path / "t", problems(10)), jsonl(tmp_path / "e", problems(3, 100))
    config = jsonl_config(train, evaluate=held)
    dataset = PromptDataset(config, trial(tmp_path), char_tokenizer(tmp_path / "model"))
    assert (dataset.size("train"), dataset.size("eval")) == (10, 3)
    assert dataset.prompt("eval", 2).answer == "102"
    assert dataset_files(config, trial(tmp_path)).demos is None


def test_needed_split_must_not_be_empty(tmp_path):
    one = jsonl(tmp_path / "one", problems(1))
    with pytest.raises(DataError, match="data.eval_fraction=0.0 holds out none of 1 prompts"):
        split_sizes(jsonl_config(one, eval_fraction=0.0), trial(tmp_path))
    assert split_sizes(jsonl_config(one, eval_fraction=0.0, problems=0), trial(tmp_path)) == {"train": 1, "eval": 0}
    with pytest.raises(DataError, match="no prompts to train on"):
        split_sizes(jsonl_config(jsonl(tmp_path / "none", [])), trial(tmp_path))
    with pytest.raises(DataError, match="no problems to evaluate on"):
        split_sizes(jsonl_config(one, evaluate=jsonl(tmp_path / "none", [])), trial(tmp_path))


def test_check_and_prompt_name_too_long_prompt(tmp_path):
    tokenizer = char_tokenizer(tmp_path / "model")
    train = jsonl(tmp_path / "t", [{"prompt": "a1=", "answer": "1"}, {"prompt": "a1" * 20, "answer": "1"}])
    config = jsonl_config(train, eval_fraction=0.0, problems=0, max_prompt_tokens=16)
    dataset = PromptDataset(config, trial(tmp_path), tokenizer)
    for call in (dataset.check, lambda: dataset.prompt("train", 1)):
        with pytest.raises(DataError, match=f"{train}:2: the prompt has 41 tokens, but data.max_prompt_tokens is 16"):
            call()
    assert len(dataset.prompt("train", 0).ids) == 4


MESSAGES = {"prompt": [{"role": "user", "content": "a"}], "answer": "1"}


@pytest.mark.parametrize(
    ("rows", "asked", "problem"),
    [
        # found by its prompt, not when the file is opened
        ('{"prompt": "a1=", "answer": "1", "level": 1e999}\n', ("train", 0), "t:1: Number out of range"),
        (problems(4), ("train", 4), "the file has 4"),
        (problems(4), ("train", -1), "the file has 4"),
        (problems(4), ("test", 0), "split 'test' not found"),
        ([*problems(1), MESSAGES], None, "t:2: the prompt is a list of messages, but the model has no chat template"),
    ],
)
def test_prompt_that_is_not_there_is_named(tmp_path, rows, asked, problem):
    """``asked``: the split and the index; without them all prompts are checked."""
    path = jsonl(tmp_path / "t", [] if isinstance(rows, str) else rows)
    if isinstance(rows, str):
        path.write_text(rows)
    config = jsonl_config(path, eval_fraction=0.0, problems=0)
    dataset = PromptDataset(config, trial(tmp_path), char_tokenizer(tmp_path / "model"))
    with pytest.raises(DataError, match=problem):
        dataset.prompt(*asked) if asked else dataset.check()


def test_check_data_reads_what_the_trial_will_read(tmp_path):
    tokenizer = char_tokenizer(tmp_path / "model")
    train = jsonl(tmp_path / "t", problems(20))
    demos = jsonl(tmp_path / "d", [{"prompt": "a1=", "response": "#1"}, {"prompt": "a1=", "response": ""}])
    data = DataConfig(train=str(train), demos=str(demos), eval_fraction=0.0)
    config = Config(data=data, evaluation=EvalConfig(problems=0))
    assert check_data(config, trial(tmp_path), tokenizer)[0] == {"train": 20, "eval": 0}
    with pytest.raises(DataError, match=f"{demos}:2: response is empty"):
        check_data(config.model_copy(update={"warmup": WarmupConfig(steps=1)}), trial(tmp_path), tokenizer)


def test_file_changed_during_trial_is_an_error(tmp_path):
    """The reader raises instead of returning another prompt."""
    train = jsonl(tmp_path / "t", problems(5))
    config = jsonl_config(train, eval_fraction=0.0, problems=0)
    dataset = PromptDataset(config, trial(tmp_path), char_tokenizer(tmp_path / "model"))
    train.write_text("x" + json.dumps(problems(1)[0]) + "\n")
    with pytest.raises(DataError, match=":4: "):
        dataset.prompt("train", 3)


def test_unknown_characters_and_few_prompts_are_warned_of(tmp_path):
    """The tokenizer drops them silently, so the model is asked something else than the file says."""
    tokenizer = char_tokenizer(tmp_path / "model")
    train = jsonl(tmp_path / "t", [{"prompt": "price in € =", "answer": "1"}, {"prompt": "漢 =", "answer": "2"}])
    data = DataConfig(train=str(train), eval_fraction=0.0)
    config = Config(data=data, evaluation=EvalConfig(problems=0))
    unknown, few = check_data(config, trial(tmp_path), tokenizer)[1]
    assert unknown == "the tokenizer does not know 2 characters of the prompts, and loses them: € 漢"
    assert few.startswith(f"there are fewer train prompts (2) than train.batch_groups ({config.train.batch_groups})")


# ---- Rows of an epoch of a mixture, and the order in which the ledger takes them


def sources(*sizes):
    ends = np.cumsum([0, *sizes])
    return [np.arange(start, end) for start, end in pairwise(ends)]


def test_shares_are_those_of_the_weights():
    assert copies_in_epoch([100, 30], [1.0, 1.0]) == [100, 100]
    assert copies_in_epoch([100, 30], [3.0, 1.0]) == [100, 33]
    assert copies_in_epoch([10, 30], [0.5, 0.1]) == [150, 30]
    assert copies_in_epoch([7], [2.0]) == [7]


def test_small_source_is_repeated_evenly():
    counts = Counter(epoch_of_mixture(sources(100, 30), [1.0, 1.0], seed=1).tolist())
    assert all(counts[i] == 1 for i in range(100))
    assert sorted(counts[i] for i in range(100, 130)) == [3] * 20 + [4] * 10


def test_epoch_depends_on_the_seed_alone():
    first = epoch_of_mixture(sources(100, 30), [1.0, 1.0], seed=1)
    assert (first == epoch_of_mixture(sources(100, 30), [1.0, 1.0], seed=1)).all()
    assert (first != epoch_of_mixture(sources(100, 30), [1.0, 1.0], seed=2)).any()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0.05, 20)), min_size=1, max_size=4),
    st.integers(0, 5),
    st.integers(0, 400),
)
def test_cursor_continues_without_loss_or_repeat(parts, seed, cut):
    """A run that stops at any position and starts again takes every copy of an epoch exactly once."""
    sizes, weights = [size for size, _ in parts], [weight for _, weight in parts]
    rows = epoch_of_mixture(sources(*sizes), weights, seed)
    assert set(rows.tolist()) == set(range(sum(sizes)))
    cut = min(cut, len(rows))
    before, after = PromptOrder(seed, len(rows)), PromptOrder(seed, len(rows))
    taken = [before.at(p) for p in range(cut)] + [after.at(p) for p in range(cut, len(rows))]
    again = epoch_of_mixture(sources(*sizes), weights, seed)
    assert Counter(again[taken].tolist()) == Counter(rows.tolist())


@pytest.mark.parametrize(
    ("rows", "weights", "problem"),
    [
        ([10**8, 10], [1.0, 1.0], "source 1 with weight"),
        ([10**6, 10], [1e-6, 1.0], "source 1 with weight"),
        ([10, 0], [1.0, 1.0], "no rows to train on"),
    ],
)
def test_impossible_epoch_is_refused(rows, weights, problem):
    with pytest.raises(DataError, match=problem):
        copies_in_epoch(rows, weights)


# ---- Data of evaluation sets: the trial's own copy, kept out of training, the same for the life of the trial


def config_of(train, path, fraction=0.0, **own):
    """Return a trial with the set ``more``, and nothing held out unless ``fraction``."""
    sets = {"eval": EvalSetConfig(problems=int(fraction > 0)), "more": EvalSetConfig(path=str(path), **own)}
    data = DataConfig(train=str(train), eval_fraction=fraction, verifier="exact")
    return Config(data=data, evaluation=EvalConfig(problems=2, sets=sets))


def rows(*prompts):
    return [{"prompt": prompt, "answer": "1"} for prompt in prompts]


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_problems_of_a_set_are_not_trained_on(tmp_path, fraction):
    train = jsonl(tmp_path / "t.jsonl", rows(*(f"{n}+{n}=" for n in range(20))))
    config = config_of(train, jsonl(tmp_path / "m.jsonl", rows("3+3=", "4 + 4=", "5+5= ", "x")), fraction)
    paths = trial(tmp_path)
    convert_sets(config, paths)
    splits = open_splits(config, paths)
    train_prompts = {splits.train[i].prompt for i in range(len(splits.train))}
    assert len(splits.sets["more"]) == 4 and not train_prompts & {"3+3=", "5+5="}
    assert splits.sizes()["train"] + splits.sizes()["eval"] + splits.leaked == 20
    assert count_held_out(config, trial(tmp_path / "new"), 100) == splits.sizes()["eval"], "before there is a copy"
    tokenizer = char_tokenizer(tmp_path / "model")
    assert check_data(config, paths, tokenizer).sizes["more"] == 4
    assert PromptDataset(config, paths, tokenizer).prompt("more", 3).text == "x"


def test_set_has_its_own_layout(tmp_path):
    train = jsonl(tmp_path / "t.jsonl", rows("a"))
    config = config_of(train, jsonl(tmp_path / "m.jsonl", [GSM8K]), layout="gsm8k")
    convert_sets(config, trial(tmp_path))
    [problem] = open_splits(config, trial(tmp_path)).sets["more"].read(range(1))
    assert problem.prompt == GSM8K["question"]


def test_changed_source_of_a_set_is_refused(tmp_path):
    train, paths = jsonl(tmp_path / "t.jsonl", rows("a")), trial(tmp_path)
    begun = config_of(train, tmp_path / "m.jsonl")
    check_copy(begun, begun, paths)
    with pytest.raises(ConfigError) as refused:
        check_copy(config_of(train, tmp_path / "other.jsonl"), begun, paths)
    assert refused.value.field == "evaluation.sets.more.path"
    with pytest.raises(ConfigError, match="begun with None"):
        check_copy(begun, Config(), paths)


@pytest.mark.processes
def test_references_of_a_set_are_checked_by_its_verifier(tmp_path):
    train = jsonl(tmp_path / "t.jsonl", [{"prompt": "a", "answer": "it depends"}])
    more = jsonl(tmp_path / "m.jsonl", [{"prompt": "b", "answer": "it depends, too"}])
    paths = trial(tmp_path)
    convert_sets(config_of(train, more), paths)
    check_references(config_of(train, more), paths)
    with pytest.raises(DataError, match="answer 'it depends, too' cannot be verified"):
        check_references(config_of(train, more, verifier="math"), paths)


def judged_by_exact(train, held_out, **fields):
    """Return a trial whose held-out problems ``exact`` judges, and its train prompts ``math``."""
    data = DataConfig(train=str(train), eval=str(held_out), verifier="math")
    return Config(data=data, evaluation=EvalConfig(sets={"eval": EvalSetConfig(verifier="exact")}), **fields)


@pytest.mark.processes
def test_held_out_references_have_one_verifier(tmp_path):
    """The verifier of the train prompts never judges the held-out problems, so it need not know their references."""
    good, other = (
        jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name, "answer": answer}])
        for name, answer in (("one", "1"), ("text", "it depends"))
    )
    check_references(judged_by_exact(good, other), trial(tmp_path))
    with pytest.raises(DataError, match=r"text.jsonl:1: answer 'it depends' cannot be verified"):
        check_references(judged_by_exact(other, good), trial(tmp_path))


@pytest.mark.processes
def test_evaluation_alone_checks_no_train_reference(tmp_path):
    one, other = (jsonl(tmp_path / f"{n}.jsonl", [{"prompt": "a", "answer": "it depends"}]) for n in (1, 2))
    evaluates = judged_by_exact(one, other).model_copy(update={"train": TrainConfig(loop="evaluate")})
    check_references(evaluates, trial(tmp_path))


# ---- Near-duplicates of held-out prompts, against a comparison of every pair


TEXTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=14).map(" ".join)


def jaccard(a, b):
    one, other = shingles(a), shingles(b)
    return len(one & other) / len(one | other)


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=8), st.lists(TEXTS, max_size=8))
def test_index_misses_no_pair(held_out, train):
    index = NearDuplicates()
    for number, text in enumerate(held_out):
        index.add(str(number), text)
    for text in train:
        best = max(jaccard(text, other) for other in held_out)
        found = index.nearest(text)
        assert (found.similarity if found else 0.0) == (best if best >= SIMILAR else 0.0)


def test_one_changed_word_is_near():
    text = "A farmer has 12 cows and sells 3 of them to his neighbour, who already has 20 cows on a large green field"
    index = NearDuplicates()
    index.add("e:1", text)
    assert index.nearest(text.replace("green", "wide")).where == "e:1"
    assert index.nearest(text.upper()).similarity == 1.0
    assert index.nearest("A farmer has 12 cows and buys 3 more from a neighbour. How many cows has he?") is None


def test_short_prompts_are_near_only_if_equal():
    index = NearDuplicates()
    index.add("e:1", "2+2")
    assert index.nearest("2 + 2").similarity == 1.0
    assert index.nearest("2+3") is None and index.nearest("") is None


def test_supervised_run_has_no_prompts_unless_they_are_given(tmp_path):
    config = Config(train=TrainConfig.model_validate({"ppo": {"algorithm": "sft"}}), evaluation=EvalConfig(problems=0))
    prompts = PromptDataset(config, trial(tmp_path), char_tokenizer(tmp_path / "model"))
    assert prompts.sizes() == {"train": 0, "eval": 0} and not prompts.check().unknown
    assert check_references(config, trial(tmp_path)) == []
    held_out = config.data.model_copy(update={"eval": str(jsonl(tmp_path / "e", problems(3)))})
    assert split_sizes(config.model_copy(update={"data": held_out}), trial(tmp_path)) == {"train": 0, "eval": 3}
