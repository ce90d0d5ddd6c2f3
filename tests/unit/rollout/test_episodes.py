"""An episode that would spoil its batch is refused with the part that is wrong."""

import dataclasses

import numpy as np
import pytest

from realsys.cluster.stream.codec import encode_group
from realsys.errors import AgentError
from realsys.generation.completion import Completion
from realsys.rollout.episodes import RowBuilder, check_episode
from realsys.types import Episode, Group, Ticket

LONGEST = 8


def completion(count=3):
    tokens = np.arange(count, dtype=np.int32)
    return Completion(tokens, np.zeros(count, np.float32), tokens, "stop", (("a", count),) if count else ())


def row(**changes):
    builder = RowBuilder([9, 9])
    builder.completion(completion())
    return dataclasses.replace(builder.row(), **changes)


def check(episode, sampled=3):
    check_episode(episode, LONGEST, sampled)


def test_a_good_episode_passes_with_plain_numbers():
    rewards = ((np.int64(3), np.float32(0.25)), (4, 0.5))
    episode = Episode(
        [row(rewards=rewards, teacher=teacher(3, 2))], np.float32(0.5), np.bool_(True), {"turns": np.int64(2)}
    )
    check(episode)
    assert [(type(at), type(value)) for at, value in episode.rows[0].rewards] == [(int, float)] * 2
    encode_group(Group(Ticket("1", 0, 0), [episode], "rollout_worker/0"))
    assert (episode.reward, episode.correct, episode.metrics) == (0.5, True, {"turns": 2.0})
    assert (type(episode.reward), type(episode.correct)) == (float, bool)


def bad_row(**changes):
    return Episode([row(), row(**changes)], 1.0)


def bad(**fields):
    return Episode(**{"rows": [row()], "reward": 1.0} | fields)


def row_of(prompt, count):
    builder = RowBuilder(prompt)
    builder.completion(completion(count))
    return builder.row()


def teacher(tokens, k, logprob=-2.0):
    return np.tile(np.arange(k, dtype=np.int32), (tokens, 1)), np.full((tokens, k), logprob, np.float32)


BAD_ROWS = [
    ({"tokens": np.arange(5)}, "tokens must be a one-dimensional array of int32"),
    ({"tokens": [1, 2, 3, 4, 5]}, "tokens must be a one-dimensional array of int32"),
    ({"loss_mask": np.ones(5, np.int32)}, "loss_mask must be a one-dimensional array of bool"),
    ({"loss_mask": np.zeros(4, np.bool_)}, "5 tokens and a loss_mask of 4"),
    ({"loss_mask": np.array([True, True, True, False, False])}, "loss_mask.0. is True"),
    ({"logprobs": np.zeros(2, np.float32)}, "3 tokens with loss_mask, 2 logprobs"),
    ({"logprobs": np.full(3, np.nan, np.float32)}, "a log-prob is not finite"),
    ({"versions": np.zeros(4, np.int32)}, "4 versions"),
    ({"finish_reason": "done"}, "finish_reason 'done'"),
    ({"route": (("a", 2),)}, "route has 2 tokens"),
    ({"rewards": ((1, 1.0),)}, "reward at position 1"),
    ({"rewards": ((5, 1.0),)}, "reward at position 5"),
    ({"rewards": ((4, np.inf),)}, "reward inf at position 4"),
    ({"rewards": ((4, 1.0), (3, 1.0))}, "reward at position 3 after one at 4"),
    ({"rewards": ((4, 1.0), (4, 1.0))}, "reward at position 4 after one at 4"),
    ({"logprobs": np.full(3, -np.inf, np.float32)}, "a log-prob is not finite"),
    ({"logprobs": np.full(3, 0.5, np.float32)}, "greater than 0"),
    ({"versions": np.array([0, -1, 0], np.int32)}, "version -1: it must be at least 0"),
    ({"route": (("a", -3), ("b", 6))}, "route has .'a', -3."),
    ({"route": ((7, 3),)}, "route has .7, 3."),
    ({"route": (("a", np.int64(3)),)}, "route has"),
    ({"tokens": np.empty(0, np.int32), "loss_mask": np.empty(0, np.bool_)}, "0 tokens"),
    ({"teacher": teacher(3, 2)[::-1]}, "tokens of the teacher must be an array of int32"),
    ({"teacher": teacher(2, 2)}, "with a line for each of 3 loss tokens"),
    ({"teacher": (teacher(3, 2)[0], teacher(3, 1)[1])}, "the teacher's 2 tokens and 1 log-probs"),
    ({"teacher": teacher(3, 0)}, "as many, and not 0"),
    ({"teacher": teacher(3, 2, -0.5)}, "their probabilities at most 1 in all"),
    ({"teacher": teacher(3, 2, np.nan)}, "log-probs of the teacher must be finite"),
    ({"teacher": (teacher(3, 1)[0] - 1, teacher(3, 1)[1])}, "a token of the teacher is below 0"),
]


BAD_EPISODES = [
    *[(bad_row(**changes), 3, f"row 1: .*{problem}") for changes, problem in BAD_ROWS],
    *[(bad(reward=value), 3, "reward is .*must be a finite number") for value in (np.nan, np.inf, None, "good")],
    (bad(correct=1), 3, "correct is 1: it must be True, False or None"),
    (bad(metrics={"x": np.nan}), 3, "metric 'x' is nan"),
    (bad(metrics={str(k): 0.0 for k in range(65)}), 3, "at most 64"),
    (bad(metrics={1: 0.0}), 3, "metrics has the name 1"),
    (bad(metrics={"x" * 101: 0.0}), 3, "1 to 100 printable"),
    (bad(metrics={"\udc80": 0.0}), 3, "1 to 100 printable"),
    (bad(metrics=[("x", 0.0)]), 3, "metrics must be a dict"),
    (bad(rows=[1]), 3, "row 0: is a int"),
    (bad(rows=[{}]), 3, "row 0: is a dict"),
    (bad(rows=[]), 3, "no rows"),
    (bad(rows=[row_of([1] * 6, 3)]), 3, "row 0: 9 tokens, but train.microbatch_tokens is 8"),
    (bad(rows=[row_of([9, 9], 0)]), 3, "3 tokens were sampled, but no row has a loss_mask"),
]


@pytest.mark.parametrize(("episode", "sampled", "problem"), BAD_EPISODES)
def test_bad_episode_is_named_with_its_problem(episode, sampled, problem):
    with pytest.raises(AgentError, match=problem):
        check(episode, sampled)


def test_rows_together_may_exceed_the_limit():
    check(Episode([row()] * 3, 1.0), sampled=9)


def test_empty_completions_need_no_trained_tokens():
    check(Episode([row_of([9, 9], 0)], 0.0), sampled=0)
