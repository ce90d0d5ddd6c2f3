"""The rubric of a judge in a file: the launcher reads it, so that the trial keeps its text and workers need no file."""

from __future__ import annotations

from pathlib import Path

from realsys.config.fields import replaced
from realsys.config.schema import RolloutConfig
from realsys.errors import ConfigError


def read_rubric(rollout: RolloutConfig) -> RolloutConfig:
    """Return the settings with the text of ``rubric_file`` as the rubric. Raises ConfigError."""
    judge = rollout.reward.judge
    field, name = "rollout.reward.judge.rubric_file", judge.rubric_file
    if not name:
        return rollout
    if judge.rubric:
        raise ConfigError(field, name, "must be empty, because rollout.reward.judge.rubric is set")
    try:
        text = Path(name).expanduser().read_text("utf-8").strip()
    except OSError as error:
        raise ConfigError(field, name, f"cannot be read: {error.strerror or error}") from None
    except UnicodeError:
        raise ConfigError(field, name, "is not a text in UTF-8") from None
    if not text:
        raise ConfigError(field, name, "is empty")
    judge = judge.model_copy(update={"rubric": text, "rubric_file": ""})
    return replaced(rollout, ["reward", "judge"], judge)
