"""Data of evaluation sets: the trial's own copy, kept out of training, the same for the life of the trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from realsys.config.schema import Config, DataConfig, EvalConfig
from realsys.config.schema_data import EvalSetConfig
from realsys.data.check import check_data
from realsys.data.convert import check_copy, convert_sets, count_held_out
from realsys.data.prompts import PromptDataset, open_splits
from realsys.errors import ConfigError, DataError
from realsys.rollout.check_references import check_references
from tests.support.data.data_rows import GSM8K
from tests.support.training.data_models import char_tokenizer, jsonl, trial


def config_of(train: Path, path: Path, fraction: float = 0.0, **own: Any) -> Config:
    """Return a trial with the set ``more``, and nothing held out unless ``fraction``."""
    sets = {"eval": EvalSetConfig(problems=int(fraction > 0)), "more": EvalSetConfig(path=str(path), **own)}
    data = DataConfig(train=str(train), eval_fraction=fraction, verifier="exact")
    return Config(data=data, evaluation=EvalConfig(problems=2, sets=sets))


def rows(*prompts: str) -> list[dict[str, str]]:
    return [{"prompt": prompt, "answer": "1"} for prompt in prompts]


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_problems_of_a_set_are_not_trained_on(tmp_path: Path, fraction: float):
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


def test_set_has_its_own_layout(tmp_path: Path):
    train = jsonl(tmp_path / "t.jsonl", rows("a"))
    config = config_of(train, jsonl(tmp_path / "m.jsonl", [GSM8K]), layout="gsm8k")
    convert_sets(config, trial(tmp_path))
    [problem] = open_splits(config, trial(tmp_path)).sets["more"].read(range(1))
    assert problem.prompt == GSM8K["question"]


def test_changed_source_of_a_set_is_refused(tmp_path: Path):
    train, paths = jsonl(tmp_path / "t.jsonl", rows("a")), trial(tmp_path)
    begun = config_of(train, tmp_path / "m.jsonl")
    check_copy(begun, begun, paths)
    with pytest.raises(ConfigError) as refused:
        check_copy(config_of(train, tmp_path / "other.jsonl"), begun, paths)
    assert refused.value.field == "evaluation.sets.more.path"
    with pytest.raises(ConfigError, match="begun with None"):
        check_copy(begun, Config(), paths)


@pytest.mark.processes
def test_references_of_a_set_are_checked_by_its_verifier(tmp_path: Path):
    train = jsonl(tmp_path / "t.jsonl", [{"prompt": "a", "answer": "it depends"}])
    more = jsonl(tmp_path / "m.jsonl", [{"prompt": "b", "answer": "it depends, too"}])
    paths = trial(tmp_path)
    convert_sets(config_of(train, more), paths)
    check_references(config_of(train, more), paths)
    with pytest.raises(DataError, match="answer 'it depends, too' cannot be verified"):
        check_references(config_of(train, more, verifier="math"), paths)


def judged_by_exact(train: Path, held_out: Path, **fields: Any) -> Config:
    """Return a trial whose held-out problems ``exact`` judges, and its train prompts ``math``."""
    data = DataConfig(train=str(train), eval=str(held_out), verifier="math")
    return Config(data=data, evaluation=EvalConfig(sets={"eval": EvalSetConfig(verifier="exact")}), **fields)


@pytest.mark.processes
def test_held_out_references_have_one_verifier(tmp_path: Path):
    """The verifier of the train prompts never judges the held-out problems, so it need not know their references."""
    good, other = (
        jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name, "answer": answer}])
        for name, answer in (("one", "1"), ("text", "it depends"))
    )
    check_references(judged_by_exact(good, other), trial(tmp_path))
    with pytest.raises(DataError, match=r"text.jsonl:1: answer 'it depends' cannot be verified"):
        check_references(judged_by_exact(other, good), trial(tmp_path))


@pytest.mark.processes
def test_evaluation_alone_checks_no_train_reference(tmp_path: Path):
    one, other = (jsonl(tmp_path / f"{n}.jsonl", [{"prompt": "a", "answer": "it depends"}]) for n in (1, 2))
    check_references(judged_by_exact(one, other, evaluate_only=True), trial(tmp_path))
