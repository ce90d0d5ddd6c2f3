"""The result of a user's run becomes reward, verdict, metrics and rewards of completions."""

import numpy as np
import pytest

from realsys.errors import AgentError
from realsys.rollout.agents.captured import RunOutcome, outcome_of


@pytest.mark.parametrize(
    ("returned", "outcome"),
    [
        (None, RunOutcome()),
        (0.5, RunOutcome(0.5)),
        (2, RunOutcome(2.0)),
        (np.float32(0.5), RunOutcome(0.5)),
        (True, RunOutcome(1.0, True)),
        (np.bool_(False), RunOutcome(0.0, False)),
        ({"reward": 1, "correct": False, "answer": "7"}, RunOutcome(1.0, False, answer="7")),
        ({"metrics": {"tools": 2}}, RunOutcome(metrics={"tools": 2})),
        ({"chatcmpl-1": 0.5, "chatcmpl-2": 1}, RunOutcome(0.0, rewards={"chatcmpl-1": 0.5, "chatcmpl-2": 1.0})),
        ({"reward": 1, "rewards": {"chatcmpl-1": 0.5}}, RunOutcome(1.0, rewards={"chatcmpl-1": 0.5})),
        ({}, RunOutcome()),
    ],
)
def test_result_is_read(returned, outcome):
    assert outcome_of(returned) == outcome


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("1.0", "run returned '1.0'"),
        ([1.0], "run returned [1.0]"),
        ({"reward": "high"}, "the reward 'high'"),
        ({"reward": 1, "score": 2}, "the key 'score'"),
        ({"chatcmpl-1": "high"}, "'high' for 'chatcmpl-1'"),
        ({1: 0.5}, "by id of a completion"),
        ({"reward": 1, "rewards": 3}, "by id of a completion"),
    ],
)
def test_wrong_result_is_an_error(returned, problem):
    with pytest.raises(AgentError) as raised:
        outcome_of(returned)
    assert problem in str(raised.value)
