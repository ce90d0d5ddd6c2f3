"""Settings of a call: bounds of the agent and of the episode, sampling of the policy or of the request."""

import json
import logging

import pytest

from realsys.generation.client import SamplingSpec
from realsys.rollout.gateway.dialect import BadRequest, GatewayCall
from realsys.rollout.gateway.sampling import LIMIT, TOO_LONG, CallLimits, Wishes, ignored, spec_of

POLICY = SamplingSpec(temperature=0.7, max_new_tokens=50, min_new_tokens=8, stop=("END",), stop_token_ids=(9,))
LIMITS = CallLimits(row=100, turns=3, in_flight=4, sampled=60)
WISHES = {"temperature": 0.2, "top_p": 0.5, "sampling_seed": 3}


def refusal(body, *arguments):
    with pytest.raises(BadRequest) as caught:
        body(*arguments)
    return caught.value


def test_call_without_wishes_has_the_policy_unchanged():
    assert spec_of(GatewayCall("chat"), POLICY, "policy", 1000) is POLICY


@pytest.mark.parametrize(("asked", "room", "most"), [(None, 1000, 50), (10, 1000, 10), (80, 1000, 50), (40, 20, 20)])
def test_shortest_bound_limits_the_completion(asked, room, most):
    assert spec_of(GatewayCall("chat", max_tokens=asked), POLICY, "policy", room).max_new_tokens == most


def test_short_bound_lowers_the_least_length():
    assert spec_of(GatewayCall("chat", max_tokens=5), POLICY, "policy", 1000).min_new_tokens == 5


def test_stops_of_the_agent_are_added():
    spec = spec_of(GatewayCall("chat", stop=("x", "END"), stop_token_ids=(4, 9)), POLICY, "policy", 1000)
    assert (spec.stop, spec.stop_token_ids) == (("END", "x"), (9, 4))


def test_policy_replaces_the_sampling_of_the_agent():
    assert spec_of(GatewayCall("chat", sampling=WISHES), POLICY, "policy", 1000) is POLICY


def test_request_mode_obeys_the_agent():
    spec = spec_of(GatewayCall("chat", sampling=WISHES | {"top_k": 0}), POLICY, "request", 1000)
    assert (spec.temperature, spec.top_p, spec.top_k, spec.sampling_seed) == (0.2, 0.5, -1, None)


def test_value_out_of_bounds_names_the_field():
    error = refusal(spec_of, GatewayCall("chat", sampling={"top_p": 3.0}), POLICY, "request", 1000)
    assert (error.status, error.field) == (400, "top_p")


def test_top_logprobs_reach_the_engine():
    assert spec_of(GatewayCall("chat", logprobs=True, top_logprobs=3), POLICY, "policy", 1000).top_logprobs_num == 3


YES = {"type": "const_string", "value": "yes"}


def test_grammar_reaches_the_engine():
    """Behind the reasoning, if the prompt has opened one."""
    call = GatewayCall("chat", grammar=(YES, "response_format"))
    plain, opened = (spec_of(call, POLICY, "policy", 1000, opened=opened).structural_tag for opened in (False, True))
    assert json.loads(plain) == {"type": "structural_tag", "format": YES}
    first, second = json.loads(opened)["format"]["elements"]
    assert (first["end"], second) == ("</think>", YES)


@pytest.mark.parametrize(
    ("grammars", "tools", "named"), [(True, [], []), (False, [], ["text"]), (True, [{}], ["text"])]
)
def test_grammar_is_ignored_without_an_engine_for_it_and_with_tools(grammars, tools, named):
    call = GatewayCall("chat", grammar=(YES, "text"), tools=tools)
    assert ignored(call, "policy", grammars) == named
    assert (call.grammar is None) == bool(named)


def test_prompt_without_room_has_the_code_of_openai():
    assert LIMITS.room(99, 0) == 1 and LIMITS.room(10, 50) == 10
    error = refusal(LIMITS.room, 100, 0)
    assert (error.status, error.code) == (400, TOO_LONG) and "maximum context length is 100" in error.message


@pytest.mark.parametrize(("turns", "running", "sampled", "n", "status"), [(3, 0, 0, 1, 400), (0, 0, 60, 1, 400)])
def test_used_up_episode_is_refused_for_good(turns, running, sampled, n, status):
    error = refusal(LIMITS.admit, GatewayCall("chat", n=n), turns, running, sampled)
    assert (error.status, error.code) == (status, LIMIT)


def test_too_many_completions_at_a_time_may_retry():
    LIMITS.admit(GatewayCall("chat", n=2), 2, 2, 59)
    assert refusal(LIMITS.admit, GatewayCall("chat", n=2), 0, 3, 0).status == 429
    assert refusal(LIMITS.admit, GatewayCall("chat", n=5), 0, 0, 0).field == "n"


def test_each_combination_of_wishes_is_logged_once(caplog):
    caplog.set_level(logging.INFO)
    wishes = Wishes()
    for temperature in (0.2, 0.2, 0.4):
        metrics = wishes.note(GatewayCall("chat", sampling={"temperature": temperature}), "policy")
    assert metrics == {"gateway/asked_temperature": 0.4}
    assert [record.args[0] for record in caplog.records] == ["temperature=0.2", "temperature=0.4"]
