"""The file of a rubric is read once, by the launcher; the trial keeps its text."""

from __future__ import annotations

from datetime import datetime

import pytest

from realsys.config.schema import Config, DataConfig, EvalConfig
from realsys.config.schema_data import EvalSetConfig
from realsys.errors import ConfigError
from realsys.launch.prepare import resolve
from realsys.reward.rubric import read_rubric


def with_judge(fileroot=".", **arguments):
    return Config(fileroot=str(fileroot), data=DataConfig(verifier="judge", verifier_args=arguments))


def test_trial_keeps_the_text_of_the_file(tmp_path):
    file = tmp_path / "rubric.txt"
    file.write_text("Judge this.\n{completion}\n")
    config = with_judge(tmp_path, rubric_file=str(file))
    resolved = resolve(config, now=datetime.now())
    assert resolved.data.verifier_args == {"rubric": "Judge this.\n{completion}", "rubric_file": ""}
    settings = with_judge(rubric="{completion}")
    assert read_rubric(settings) == settings


def test_evaluation_set_has_a_file_of_its_own(tmp_path):
    file = tmp_path / "rubric.txt"
    file.write_text("{completion}")
    own = EvalSetConfig(verifier="judge", verifier_args={"rubric_file": str(file)})
    config = read_rubric(Config(evaluation=EvalConfig(sets={"open": own})))
    assert config.evaluation.sets["open"].verifier_args["rubric"] == "{completion}"


@pytest.mark.parametrize(
    ("content", "rubric", "problem"),
    [
        (None, "", "cannot be read: No such file"),
        (b" \n", "", "is empty"),
        (b"\xff", "", "is not a text in UTF-8"),
        (b"{completion}", "{completion}", "rubric is set"),
    ],
)
def test_unusable_file_is_refused(tmp_path, content, rubric, problem):
    file = tmp_path / "rubric.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        read_rubric(with_judge(rubric=rubric, rubric_file=str(file)))
