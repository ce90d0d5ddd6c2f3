"""The file of a rubric is read once, by the launcher; the trial keeps its text."""

from __future__ import annotations

from datetime import datetime

import pytest

from realsys.config.schema import Config
from realsys.config.schema_rollout import JudgeConfig, RewardConfig, RolloutConfig
from realsys.errors import ConfigError
from realsys.launch.prepare import resolve
from realsys.reward.judge.rubric import read_rubric


def rollout(**judge):
    return RolloutConfig(reward=RewardConfig(judge=JudgeConfig(**judge)))


def test_trial_keeps_the_text_of_the_file(tmp_path):
    file = tmp_path / "rubric.txt"
    file.write_text("Judge this.\n{completion}\n")
    config = Config(fileroot=str(tmp_path), rollout=rollout(rubric_file=str(file)))
    judge = resolve(config, now=datetime.now()).rollout.reward.judge
    assert (judge.rubric, judge.rubric_file) == ("Judge this.\n{completion}", "")
    settings = rollout(rubric="{completion}")
    assert read_rubric(settings) is settings


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
        read_rubric(rollout(rubric=rubric, rubric_file=str(file)))
