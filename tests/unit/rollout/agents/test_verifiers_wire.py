"""Results of runs of an environment server, from its messages."""

import math

import pytest

from realsys.errors import AgentError
from realsys.rollout.agents.verifiers import Assembly, client_of, pack, run_request, unpack


def trace(name, rewards, agent="agent", trainable=True, **others):
    """Return the delta of a finished trace."""
    scores = {key: {"score": score, "weight": weight} for key, (score, weight) in rewards.items()}
    fields = {"agent": {"name": agent, "trainable": trainable}, "ok": True, "is_timeout": False, "metrics": {}}
    return {"trace": name, "open": {"id": name}, "set": {**fields, "rewards": scores, **others}}


def outcome(*deltas, ok=True, **head):
    """Return the result of a run that ends with the traces of ``deltas``."""
    assembly = Assembly()
    for delta in deltas:
        assembly.apply(unpack(pack(delta)))
    ids = list(assembly.traces)
    summaries = [{"id": name, "nodes": 2, "calls": 1} for name in ids]
    return assembly.outcome({"success": True, "head": {"ok": ok, "errors": [], **head}, "traces": summaries})


def test_reward_is_weighted_sum():
    result = outcome(trace("a", {"right": (1.0, 2.0), "short": (0.5, -1.0)}, metrics={"turns": 3}))
    assert result.reward == 1.5 and result.metrics == {"right": 1.0, "short": 0.5, "turns": 3.0}


def test_attempts_share_their_mean_reward():
    result = outcome(trace("a", {"right": (1.0, 1.0)}), trace("b", {"right": (0.0, 1.0)}))
    assert result.reward == 0.5 and result.metrics == {"right": 0.5}


def test_agent_that_is_not_trained_gives_no_reward():
    judge = trace("j", {"strict": (9.0, 1.0)}, agent="judge", trainable=False)
    result = outcome(trace("a", {"right": (1.0, 1.0)}, agent="solver"), judge)
    assert result.reward == 1.0 and result.ignored == {"j"}
    assert result.metrics == {"solver.right": 1.0, "judge.strict": 9.0}


def test_last_value_of_a_field_counts():
    late = {"trace": "a", "set": {"rewards": {"right": {"score": 1.0}}}}
    assert outcome(trace("a", {"right": (0.0, 1.0)}), late).reward == 1.0


def test_discarded_attempt_is_forgotten():
    result = outcome(
        trace("a", {"right": (0.0, 1.0)}), {"trace": "a", "discard": True}, trace("b", {"right": (1.0, 1.0)})
    )
    assert result.reward == 1.0


RIGHT = {"right": (0.0, 1.0)}
BAD = {**trace("a", {}, ok=False), "errors": [{"type": "TaskError", "message": "bad"}]}
LATE = trace("a", RIGHT, is_timeout=True, stop_condition="agent_timeout")
NO_DISK = [{"type": "EnvError", "message": "no disk"}]
LOST = {"success": True, "head": {"ok": True}, "traces": [{"id": "a", "nodes": 1, "calls": 1}]}


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (lambda: outcome(trace("a", {})), "gave no reward"),
        (lambda: outcome(trace("a", {"right": (math.nan, 1.0)})), "must be finite"),
        (lambda: outcome(trace("a", RIGHT, ok=False), ok=False), "failed: no cause given"),
        (lambda: outcome(LATE), "timed out: agent_timeout"),
        (lambda: outcome(ok=False, errors=NO_DISK), "failed: EnvError: no disk"),
        (lambda: outcome(BAD, ok=False), "failed: TaskError: bad"),
        (lambda: Assembly().outcome({"success": False, "error": "ValueError: no such field"}), "no such field"),
        (lambda: Assembly().outcome(LOST), "no trace a"),
    ],
)
def test_failed_run_has_no_reward(run, problem):
    with pytest.raises(AgentError, match=problem):
        run()


def test_client_names_the_episode():
    chat = client_of("chat", "http://h:1/e/key/v1", "/model", None)
    assert chat == {"type": "eval", "base_url": "http://h:1/e/key/v1", "api_key_var": "REALSYS_EPISODE_KEY"}
    tokens = client_of("tokens", "http://h:1/e/key/v1", "/model", {"name": "qwen3"})
    assert (
        tokens["type"] == "train"
        and tokens["renderer_model_name"] == "/model"
        and tokens["renderer"]["name"] == "qwen3"
    )
    request = unpack(run_request({"prompt": "1+1"}, tokens, "policy"))
    assert request["task_data"] == {"prompt": "1+1"} and request["sampling"] == {}
