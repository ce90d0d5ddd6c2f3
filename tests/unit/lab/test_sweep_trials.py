"""Lists of values in the overrides of a sweep, their combinations, and the names of the trials."""

from __future__ import annotations

import pytest

from realsys.config.compose import compose
from realsys.errors import ConfigError
from realsys.lab.sweep import split_values, sweep_trials


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4,1e-3", ["1e-4", "1e-3"]),
        ("1", ["1"]),
        ("", [""]),
        ("a,", ["a", ""]),
        ("[0.9,0.95],[0.8,0.9]", ["[0.9,0.95]", "[0.8,0.9]"]),
        ("{a:1,b:[2,3]},{a:2}", ["{a:1,b:[2,3]}", "{a:2}"]),
        ("range(1,3)", ["range(1,3)"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ('"it\'s, so",b', ['"it\'s, so"', "b"]),
        (r"a\,b,c", [r"a\,b", "c"]),
        (r"'it\'s, so',b", [r"'it\'s, so'", "b"]),
        ("~/qwen,~/llama", ["~/qwen", "~/llama"]),
        ("it's,b", ["it's,b"]),
        ("[1,2", ["[1,2"]),
    ],
)
def test_commas_outside_of_brackets_and_quotes_separate(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_last_list_varies_fastest() -> None:
    overrides = ["experiment=arith", "train.optimizer.lr=1e-4,1e-3", "train.total_steps=5", "seed=1,2"]
    trials = sweep_trials(overrides, "first")
    assert [(trial.name, str(trial)) for trial in trials] == [
        ("first-lr_1e-4-seed_1", "train.optimizer.lr=1e-4 seed=1"),
        ("first-lr_1e-4-seed_2", "train.optimizer.lr=1e-4 seed=2"),
        ("first-lr_1e-3-seed_1", "train.optimizer.lr=1e-3 seed=1"),
        ("first-lr_1e-3-seed_2", "train.optimizer.lr=1e-3 seed=2"),
    ]
    last = trials[-1].overrides
    assert last == ["experiment=arith", "train.optimizer.lr=1e-3", "train.total_steps=5", "seed=2"]
    config = compose(last)
    assert (config.train.optimizer.lr, config.train.total_steps, config.seed) == (1e-3, 5, 2)


def test_override_with_plus_and_deletion_stay() -> None:
    trials = sweep_trials(["~rollout", "++seed=1,2", "trial=first"], "first")
    assert [trial.overrides for trial in trials] == [["~rollout", "seed=1"], ["~rollout", "seed=2"]]


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("model.path=~/a/qwen,/b/llama", ["s-path_a_qwen", "s-path_b_llama"]),
        ("x.betas=[0.9,0.95],[0.8,0.9]", ["s-betas_0.9_0.95", "s-betas_0.8_0.9"]),
        ("x.shift=-1,1", ["s-shift_-1", "s-shift_1"]),
        ("x.name='a b','a,b'", ["s-1", "s-2"]),  # equal in the characters of a name
        (f"x.name={'a' * 70},b", ["s-1", "s-2"]),
        ("seed=" + ",".join(["'?'", *map(str, range(9)), "' '", "'!'"]), [f"s-{n:02}" for n in range(1, 13)]),
    ],
)
def test_names_tell_values_or_are_numbered(override: str, names: list[str]) -> None:
    trials = sweep_trials([override], "s")
    assert [trial.name for trial in trials] == names
    for name in names:
        assert compose(["experiment=arith", f"trial={name}"]).trial == name


def test_fields_of_one_name_are_told_apart() -> None:
    [first, *_] = sweep_trials(["train.optimizer.lr=1,2", "warmup.optimizer.lr=3,4"], "s")
    assert first.name == "s-train.optimizer.lr_1-warmup.optimizer.lr_3"


@pytest.mark.parametrize(
    ("overrides", "field", "problem"),
    [
        (["experiment=arith", "seed=1"], "sweep", "no setting has a list of values"),
        ([], "sweep", "no setting has a list of values"),
        (["experiment=arith,math", "seed=1,2"], "experiment", "the same for all trials"),
        (["trial=a,b"], "trial", "the same for all trials"),
        (["++fileroot=a,b"], "fileroot", "the same for all trials"),
        (["recover=auto,off"], "recover", "the same for all trials"),
        (["seed=1,"], "seed", "empty value"),
        (["seed=1,2,1"], "seed", "a value twice"),
        (["seed=1,2", "seed=3"], "seed", "more than once"),
        (["seed=1,2", "+seed=3,4"], "seed", "more than once"),
    ],
)
def test_lists_that_make_no_sweep_are_refused(overrides: list[str], field: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        sweep_trials(overrides, "s")
    assert caught.value.field == field
