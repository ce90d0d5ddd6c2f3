"""References that the verifier cannot use, found before anything starts."""

import json
import sys

import pytest

from realsys.config.schema import Config, DataConfig, EvalConfig, RewardConfig, RolloutConfig
from realsys.errors import ConfigError, DataError
from realsys.reward.verifiers.base import Item
from realsys.rollout.references import bad_references, check_references
from tests.support.serving.reward_pools import BEHAVE
from tests.support.training.data_models import jsonl, trial

CHECKED = "tests.support.serving.reward_verifiers:checked"


def config_of(path, verifier="math", timeout_s=30.0):
    data = DataConfig(train=str(path), eval_fraction=0.0, verifier=verifier)
    reward = RolloutConfig(reward=RewardConfig(timeout_s=timeout_s))
    return Config(data=data, evaluation=EvalConfig(problems=0), rollout=reward)


def rows(*answers):
    return [{"prompt": f"q{k}=", "answer": answer} for k, answer in enumerate(answers)]


def items_of(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(str(k), Item(line["prompt"], "", line["answer"], {"line": k})) for k, line in enumerate(lines)]


def test_bad_reference_is_named_by_line(tmp_path):
    path = jsonl(tmp_path / "t", rows("12:00", r"28\%", "7", "it depends", r"\frac{1"))
    with pytest.raises(DataError, match=rf"{path}:4: answer 'it depends' cannot be verified: it is a text"):
        check_references(config_of(path), trial(tmp_path))


def test_good_references_pass(tmp_path):
    path = jsonl(tmp_path / "t", rows("12:00", r"28\%", "7", r"\frac{1}{2}", "x = 5", "5 cm"))
    check_references(config_of(path), trial(tmp_path))


@pytest.mark.parametrize("verifier", ["exact", BEHAVE])
def test_verifier_without_check_takes_any(tmp_path, verifier):
    path = jsonl(tmp_path / "t", rows("it depends"))
    check_references(config_of(path, verifier), trial(tmp_path))


def test_check_that_hangs_or_raises_names_line(tmp_path):
    """Each costs one row, and the other rows are checked."""
    path = jsonl(tmp_path / "t", rows("a", "spin", "raise", "a", "bad", "b"))
    items = list(bad_references(config_of(path, CHECKED, 0.5), items_of(path)))
    assert [where for where, _, _ in items] == ["1", "2", "4"]
    assert "0.55 s of CPU time" in items[0][2] and "ArithmeticError" in items[1][2] and items[2][2] == "it is bad"


def test_process_that_cannot_start_is_a_config_error(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "t", rows("a"))
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(ConfigError, match="cannot be started"):
        check_references(config_of(path), trial(tmp_path))
