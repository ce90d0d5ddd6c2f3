"""References that the verifier cannot use, found before anything starts."""

import os
import sys

import pytest

from realsys.config.fields import replaced
from realsys.config.schema import Config, DataConfig, EvalConfig
from realsys.config.schema_data import MixtureSource
from realsys.config.schema_rollout import RewardConfig, RolloutConfig
from realsys.data.arith import write_dataset
from realsys.data.convert import convert
from realsys.data.lines import ORIGIN
from realsys.errors import ConfigError, DataError
from realsys.reward.pool import VerifierPool
from realsys.reward.verifiers.contract import Item
from realsys.rollout.check_references import ReferenceChecker, check_references
from tests.support.data.data_rows import jsonl, trial
from tests.support.serving.reward_pools import BEHAVE

pytestmark = pytest.mark.processes

CHECKED = "tests.support.serving.reward_verifiers:checked"


def config_of(path, verifier="math", timeout_s=30.0):
    data = DataConfig(train=str(path), eval_fraction=0.0, verifier=verifier)
    reward = RolloutConfig(reward=RewardConfig(timeout_s=timeout_s))
    return Config(data=data, evaluation=EvalConfig(problems=0), rollout=reward)


def rows(*answers):
    return [{"prompt": f"q{k}=", "answer": answer} for k, answer in enumerate(answers)]


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


def test_rubric_key_that_a_row_lacks_is_named(tmp_path):
    """Nothing is sent to the endpoint of a judge, which does not exist."""
    path = jsonl(tmp_path / "t", [row | {"topic": "sums"} for row in rows("1")] + rows("2"))
    judge = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "rubric": "{topic} {completion}"}
    config = replaced(config_of(path, "judge"), ["data", "verifier_args"], judge)
    with pytest.raises(DataError, match=rf"{path}:2: .*the row has no key 'topic', which the rubric names"):
        check_references(config, trial(tmp_path))


def test_check_that_hangs_or_raises_names_line(tmp_path):
    """Each costs one row, and the other rows are checked."""
    items = [Item("q", "", answer) for answer in ("a", "spin", "raise", "a", "bad", "b")]
    with ReferenceChecker(config_of(tmp_path, CHECKED, 0.5)) as checker:
        problems = checker.problems(items)
    assert [problem is None for problem in problems] == [True, False, False, True, False, True]
    assert "0.55 s of CPU time" in problems[1] and "ArithmeticError" in problems[2] and problems[4] == "it is bad"


def test_reference_of_many_rows_is_checked_once(tmp_path, monkeypatch):
    """The place that a converted row came from makes no other reference; other keys do."""
    asked = []

    async def check_answer(pool, name, item):
        asked.append(item.extra)

    monkeypatch.setattr(VerifierPool, "check_answer", check_answer)
    items = [Item("q", "", "1", {ORIGIN: f"f:{k}", "unit": k // 2}) for k in range(4)]
    with ReferenceChecker(config_of(tmp_path)) as checker:
        assert checker.problems(items) == [None] * 4
    assert [extra["unit"] for extra in asked] == [0, 1]


def test_bad_reference_of_a_mixture_names_its_source(tmp_path):
    one, two = (jsonl(tmp_path / name, rows(*answers)) for name, answers in (("a", ["1"] * 3), ("b", ["2", "??"])))
    config = config_of("")
    mixture = [MixtureSource(path=str(one)), MixtureSource(path=str(two))]
    config = config.model_copy(update={"data": config.data.model_copy(update={"mixture": mixture})})
    paths = trial(tmp_path)
    convert(config, paths)
    with pytest.raises(DataError, match=rf"{two}:2: answer '\?\?' cannot be verified"):
        check_references(config, paths)


def test_process_that_cannot_start_is_a_config_error(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "t", rows("a"))
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(ConfigError, match="cannot be started"):
        check_references(config_of(path), trial(tmp_path))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            'word = item.extra["word"]',
            r"tried on .*t:1: KeyError: 'word' \(.*mine_{}.py:2: word = item.extra\[\"word\"\]\)",
        ),
        ('return "yes"', "tried on .*t:1: TypeError: returned 'yes': return a bool, a finite number or a Verdict"),
    ],
)
def test_verifier_of_the_user_is_tried(tmp_path, monkeypatch, body, problem):
    """One line with the place in the user's file, before anything starts."""
    name = f"mine_{len(body)}"  # a module is imported once
    (tmp_path / f"{name}.py").write_text(f"def judge(item):\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    path = jsonl(tmp_path / "t", rows("1", "2"))
    with pytest.raises(ConfigError, match=problem.format(len(body))):
        check_references(config_of(path, f"{name}:judge"), trial(tmp_path))


def test_verifier_of_the_user_is_tried_on_generated_rows(tmp_path, monkeypatch):
    """The arith task fits every built-in function, but not one that wants a key of the row."""
    (tmp_path / "wants.py").write_text("def judge(item):\n    return item.extra['word'] == item.completion\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    paths, config = trial(tmp_path), Config(data=DataConfig(kind="arith", verifier="wants:judge"))
    small = {"train_size": 8, "eval_size": 8, "demo_size": 8}
    write_dataset(config.data.arith.model_copy(update=small), paths.data, seed=1)
    config = replaced(config, ["evaluation", "problems"], 8)
    with pytest.raises(ConfigError, match=r"tried on .*:1: KeyError: 'word'"):
        check_references(config, paths)
    assert check_references(replaced(config, ["data", "verifier"], "exact"), paths) == []


def test_verifier_that_judges_some_is_warned_of(tmp_path, monkeypatch):
    (tmp_path / "half.py").write_text("def judge(item):\n    return 1.0 / len(item.completion)\n")
    (tmp_path / "never.py").write_text("def judge(item):\n    return item.completion == '#' + item.answer\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    path = jsonl(tmp_path / "t", rows("1", "2"))
    half, cut = check_references(config_of(path, "half:judge"), trial(tmp_path))
    assert "no verdict on 2 of 4 trials: verifier half:judge: ZeroDivisionError" in half and "half.py:2" in half
    assert "gives rewards such as 1, but a completion that is cut off gets rollout.reward.wrong=-5" in cut
    (never,) = check_references(config_of(path, "never:judge"), trial(tmp_path))
    assert "judges no reference right that stands alone" in never


def test_reference_that_is_not_judged_right_is_warned_of(tmp_path, monkeypatch):
    """The first references are right that stand alone, so each other should be."""
    (tmp_path / "most.py").write_text("def judge(item):\n    return item.completion == item.answer != '7'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    path = jsonl(tmp_path / "t", rows(*"123456789"))
    (warning,) = check_references(config_of(path, "most:judge"), trial(tmp_path))
    assert "most:judge does not judge 1 of 9 references right, the first in" in warning and "t:7" in warning
