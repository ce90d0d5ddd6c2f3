"""LlmJudge against an endpoint that misbehaves: a verdict is complete, or an error with its cause."""

import asyncio
import logging
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.errors import ConfigError, NoVerifierError, RewardError, StuckError
from realsys.reward import pool
from realsys.reward.llm_judge import WINDOW_S, LlmJudge, RateLimits, RequestGate
from realsys.reward.open_verifiers import own_verifiers
from realsys.reward.verifiers.contract import Item, Verdict
from tests.support.processes.config_trees import changed
from tests.support.rewards.judge_endpoint import KEY, JudgeEndpoint, judge_endpoint
from tests.support.serving.reward_pools import BEHAVE, until

JUDGE = "data.verifier_args"
RIGHT, WRONG = Item("2+2=", "it is 4", "4"), Item("2+2=", "it is 5", "4")


@pytest.fixture
def endpoint():
    with judge_endpoint() as started:
        yield started


def judge_settings(endpoint, *overrides):
    return changed(
        "data.verifier=judge",
        f"{JUDGE}.base_url={endpoint.url}",
        f"{JUDGE}.model=judge-7b",
        "rollout.reward.correct=1",
        "rollout.reward.wrong=-1",
        "rollout.workers=1",
        *overrides,
    )


def judged(config, *items, sharers=1):
    """Return verdicts and errors of items that are given together, and the judge."""

    async def run():
        judge = LlmJudge(config, sharers, first_delay_s=0.01)
        try:
            async with asyncio.timeout(60):
                calls = (judge.verify("judge", item) for item in items)
                return await asyncio.gather(*calls, return_exceptions=True), judge
        finally:
            await judge.close()

    return asyncio.run(run())


def test_verdict_has_reward_correctness_and_metrics(endpoint):
    (right, wrong), judge = judged(judge_settings(endpoint), RIGHT, WRONG)
    assert (right.reward, right.correct) == (1.0, True) and (wrong.reward, wrong.correct) == (-1.0, False)
    assert right.metrics["judge/correctness"] == 1.0 and right.metrics["judge_tokens"] == 100.0
    assert right.metrics["judge_retries"] == 0.0 and right.metrics["judge_seconds"] > 0.0
    assert judge.take_failures() == {} and judge.undecided == judge.waiting == 0
    body = endpoint.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge-7b", 0.0, 1024)
    assert body["response_format"]["json_schema"]["strict"] is True


def test_reward_is_between_wrong_and_correct(endpoint):
    endpoint.score = lambda completion, reference: float(completion)
    config = judge_settings(endpoint, f"{JUDGE}.correct_from=0.75")
    verdicts, _ = judged(config, *(Item("", text, "") for text in ("0.5", "0.75")))
    assert [(verdict.reward, verdict.correct) for verdict in verdicts] == [(0.0, False), (0.5, True)]


@pytest.mark.parametrize("fault", ["malformed", "schema", "truncated", "nan", "range", "500"])
def test_another_sample_mends_a_bad_verdict(endpoint, fault):
    endpoint.faults = [fault, fault]
    (verdict,), judge = judged(judge_settings(endpoint, f"{JUDGE}.retries=2"), RIGHT)
    assert verdict.correct is True and verdict.metrics["judge_retries"] == 2.0
    assert judge.take_failures() == {}
    assert [body["temperature"] for body in endpoint.bodies] == ([0.0] * 3 if fault == "500" else [0.0, 0.7, 0.7])


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("malformed", "no_verdict"),
        ("schema", "no_verdict"),
        ("truncated", "no_verdict"),
        ("nan", "no_verdict"),
        ("range", "no_verdict"),
        ("500", "endpoint"),
        ("hang", "elapsed"),
    ],
)
def test_missing_verdict_costs_one_completion(endpoint, fault, cause):
    """It is an error by its cause after the last retry, and never a reward."""
    judged(judge_settings(endpoint), RIGHT)  # the judge_settings are good
    endpoint.bodies.clear()
    endpoint.faults = ["", fault, fault]
    timeout_s = 1.0 if fault == "hang" else 60.0
    config = judge_settings(endpoint, f"{JUDGE}.retries=1", f"{JUDGE}.concurrency=1", f"{JUDGE}.timeout_s={timeout_s}")

    async def run():
        judge = LlmJudge(config, first_delay_s=0.01)
        try:
            async with asyncio.timeout(60):
                first = await judge.verify("judge", WRONG)
                with pytest.raises(RewardError, match="the judge http") as caught:
                    await judge.verify("judge", RIGHT)
                last = await judge.verify("judge", RIGHT)
        finally:
            await judge.close()
        assert (first.correct, last.correct, caught.value.cause) == (False, True, cause)
        assert judge.take_failures() == {cause: 1} and judge.undecided == 1

    asyncio.run(run())
    assert len(endpoint.bodies) == 4


@pytest.mark.parametrize("fault", ["429", "503"])
def test_busy_endpoint_is_waited_for(endpoint, fault):
    """More often than ``retries``: an outage says nothing about a completion."""
    endpoint.faults = [fault] * 4
    (verdict,), _ = judged(judge_settings(endpoint, f"{JUDGE}.retries=0"), RIGHT)
    assert verdict.correct is True and len(endpoint.bodies) == 5


def test_retry_after_pauses_all_requests(endpoint):
    endpoint.faults, endpoint.retry_after = ["429"], "1"
    verdicts, _ = judged(judge_settings(endpoint, f"{JUDGE}.concurrency=1"), RIGHT, RIGHT)
    assert all(verdict.correct for verdict in verdicts)
    assert endpoint.times[1] - endpoint.times[0] >= 0.99


def test_outage_has_an_end(endpoint):
    endpoint.faults, endpoint.always = [""], "503"
    outcomes, judge = judged(judge_settings(endpoint, f"{JUDGE}.outage_s=0.2", f"{JUDGE}.concurrency=1"), RIGHT, RIGHT)
    assert outcomes[0].correct is True
    assert isinstance(outcomes[1], RewardError) and outcomes[1].cause == "endpoint"
    assert judge.take_failures() == {"endpoint": 1}


def test_unreachable_endpoint_ends_the_run_by_name():
    config = judge_settings(JudgeEndpoint(url="http://127.0.0.1:9/v1"), f"{JUDGE}.outage_s=0.1")
    (error,), _ = judged(config, RIGHT)
    assert isinstance(error, StuckError) and "127.0.0.1:9" in str(error) and "connection failed" in str(error)


@pytest.mark.parametrize("fault", ["400", "401", "404"])
def test_refusal_is_not_repeated(endpoint, fault):
    endpoint.always = fault
    errors, _ = judged(judge_settings(endpoint, f"{JUDGE}.concurrency=1"), RIGHT, RIGHT, RIGHT)
    for error in errors:
        assert isinstance(error, StuckError) and f"status {fault}" in str(error) and "\n" not in str(error)
    assert len(endpoint.bodies) == 1


def test_refused_completion_costs_itself_only(endpoint):
    """After a first answer the judge_settings are good, so a 400 is about the completion: it is too long."""
    endpoint.faults = ["", "400"]
    (first, second, third), judge = judged(judge_settings(endpoint, f"{JUDGE}.concurrency=1"), RIGHT, RIGHT, RIGHT)
    assert first.correct and third.correct
    assert isinstance(second, RewardError) and "too long" in str(second)
    assert judge.take_failures() == {"endpoint": 1} and len(endpoint.bodies) == 3


def test_judge_without_any_verdict_is_to_blame(endpoint, monkeypatch):
    monkeypatch.setattr(pool, "HOPELESS", 3)
    endpoint.always = "malformed"
    outcomes, _ = judged(judge_settings(endpoint, f"{JUDGE}.retries=0", f"{JUDGE}.concurrency=1"), *[RIGHT] * 4)
    assert [type(outcome) for outcome in outcomes] == [RewardError, RewardError, NoVerifierError, NoVerifierError]
    assert "3 completions in a row had no verdict" in str(outcomes[2])


def test_key_is_sent_and_never_shown(endpoint, monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\n")
    config = judge_settings(endpoint, f"{JUDGE}.api_key_env=JUDGE_KEY")
    endpoint.always = "401"  # its message repeats the key
    with caplog.at_level(logging.DEBUG):
        (error,), _ = judged(config, RIGHT)
    assert endpoint.keys == [f"Bearer {KEY}"]
    assert "***" in str(error) and KEY not in str(error)
    assert KEY not in caplog.text and KEY not in config.model_dump_json()


@pytest.mark.parametrize(("sharers", "running"), [(1, 9), (4, 2)])
def test_limits_are_divided_among_workers(endpoint, sharers, running):
    config = judge_settings(endpoint, "rollout.workers=4", f"{JUDGE}.concurrency=9", f"{JUDGE}.timeout_s=50")
    endpoint.always = "hang"

    async def run():
        judge = LlmJudge(config, sharers)
        try:
            async with asyncio.timeout(30):
                tasks = [asyncio.create_task(judge.verify("judge", RIGHT)) for _ in range(12)]
                await until(lambda: endpoint.running == running)
                assert judge.waiting == 12 - running
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await judge.close()

    asyncio.run(run())
    assert endpoint.most == running


def test_cancelled_episode_cancels_its_request(endpoint):
    endpoint.faults = ["hang"]
    config = judge_settings(endpoint, f"{JUDGE}.concurrency=1", f"{JUDGE}.timeout_s=50")

    async def run():
        judge = LlmJudge(config)
        try:
            async with asyncio.timeout(30):
                hung, waiting, last = (asyncio.create_task(judge.verify("judge", RIGHT)) for _ in range(3))
                await until(lambda: endpoint.bodies)
                assert judge.waiting == 2
                waiting.cancel()
                hung.cancel()
                assert (await last).correct is True
                await until(lambda: endpoint.left)
            assert hung.cancelled() and waiting.cancelled()
            assert judge.waiting == 0 and judge.take_failures() == {}
        finally:
            await judge.close()

    asyncio.run(run())
    assert len(endpoint.bodies) == 2


def test_own_fields_replace_those_of_the_request(endpoint):
    config = judge_settings(
        endpoint,
        f"{JUDGE}.request={{temperature: null, max_tokens: null, max_completion_tokens: 99}}",
        f"{JUDGE}.response_format=none",
    )
    judged(config, RIGHT)
    body = endpoint.bodies[0]
    assert set(body) == {"model", "messages", "max_completion_tokens"} and body["max_completion_tokens"] == 99


def test_row_without_key_is_an_error_of_the_row(endpoint):
    config = judge_settings(endpoint, f"{JUDGE}.rubric=\"'{{topic}} {{completion}}'\"")
    (error, verdict), judge = judged(config, RIGHT, Item("", "4", "", {"topic": "sums"}))
    assert isinstance(error, RewardError) and "no key 'topic'" in str(error) and error.cause == "raised"
    assert math.isfinite(verdict.reward) and len(endpoint.bodies) == 1
    assert asyncio.run(judge.check_answer("judge", RIGHT)) == "the row has no key 'topic', which the rubric names"


def test_judge_takes_the_place_of_the_pool(endpoint):
    async def run():
        verifiers = own_verifiers(judge_settings(endpoint))
        try:
            return await verifiers.verify("judge", RIGHT)
        finally:
            await verifiers.close()

    assert asyncio.run(run()).correct is True


@pytest.mark.processes
def test_trial_has_a_judge_beside_processes(endpoint):
    """Each completion goes to the verifier of its data set, and failures of both are counted."""
    judge = f"{{base_url: '{endpoint.url}', model: judge-7b, retries: 0}}"
    given = changed("data.verifier=exact", f"evaluation.sets={{open: {{verifier: judge, verifier_args: {judge}}}}}")

    async def run():
        verifiers = own_verifiers(given)
        try:
            by_text = await verifiers.verify("exact", Item("1+1=", "#2", "2"))
            by_judge = await verifiers.verify("judge", RIGHT)
            endpoint.always = "malformed"
            for name, item in (("judge", RIGHT), (BEHAVE, Item("", "raise", ""))):
                with pytest.raises(RewardError):
                    await verifiers.verify(name, item)
            return by_text, by_judge, verifiers.undecided, verifiers.take_failures()
        finally:
            await verifiers.close()

    by_text, by_judge, undecided, failures = asyncio.run(run())
    assert by_text == Verdict(correct=True, answer="2") and by_judge.correct is True and len(endpoint.bodies) == 2
    assert (undecided, failures) == (2, {"no_verdict": 1, "raised": 1})


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([f"{JUDGE}.base_url=''"], "must be an address"),
        ([f"{JUDGE}.base_url=localhost:8000"], "must be an address"),
        ([f"{JUDGE}.base_url=http://me:{KEY}@host/v1"], "address alone"),
        ([f"{JUDGE}.model=''"], "name the model"),
        ([f"{JUDGE}.api_key_env={KEY}"], "not the key itself"),
        ([f"{JUDGE}.api_key_env=NOT_SET_ANYWHERE"], "is not set"),
        ([f"{JUDGE}.rubric=judge"], "would not see"),
        ([f"{JUDGE}.criteria=[{{name: a}},{{name: a}}]"], "two criteria"),
        ([f"{JUDGE}.request={{stream: true}}"], "must not set stream"),
        (["rollout.workers=32"], "divided among rollout.workers"),
        ([f"{JUDGE}.requests_per_minute=1", "rollout.workers=2"], "divided among rollout.workers"),
        ([f"{JUDGE}.modl=a"], "data.verifier_args.modl='a': unknown; did you mean model"),
        ([f"{JUDGE}.retries=-1"], "data.verifier_args.retries=-1: must be greater than or equal to 0"),
        ([f"{JUDGE}.criteria=[{{name: a b}}]"], "criteria.0.name='a b': must be 1 to 32 letters"),
        (["rollout.reward.services=1"], "set it to 0"),
    ],
)
def test_bad_setting_is_refused_in_one_line(overrides, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        LlmJudge.check(judge_settings(JudgeEndpoint(url="http://127.0.0.1:9/v1"), *overrides))
    assert "\n" not in str(caught.value) and KEY not in str(caught.value)


# ---- Gate: requests start in their order, and one that is cancelled holds up no other


def test_requests_start_in_their_order():
    async def run():
        gate, order = RequestGate(RateLimits(concurrency=1)), []

        async def ask(name):
            started = await gate.enter(1)
            order.append(name)
            await asyncio.sleep(0)
            gate.leave(started, 1)

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(ask(name)) for name in range(5)]
            await until(lambda: gate.waiting == 4)
            waiting[1].cancel()
            waiting[3].cancel()
        assert order == [0, 2, 4] and gate.waiting == 0

    asyncio.run(run())


def test_full_window_holds_the_next():
    async def run():
        gate = RequestGate(RateLimits(concurrency=9, requests=2), clock=lambda: 5.0)
        async with asyncio.timeout(30):
            tasks = [asyncio.create_task(gate.enter(1)) for _ in range(3)]
            await until(lambda: tasks[1].done())
            assert gate.waiting == 1
            tasks[2].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert [task.cancelled() for task in tasks] == [False, False, True] and gate.waiting == 0

    asyncio.run(run())


# ---- RateLimits: no window has more than its limit, whatever happens in it, and no request waits for ever


LIMITS = st.builds(
    RateLimits, concurrency=st.integers(1, 4), requests=st.integers(0, 5), tokens=st.sampled_from([0, 50, 100])
)
#: (what happens, seconds after the event before, tokens)
EVENTS = st.lists(
    st.tuples(st.sampled_from(["start", "end", "pause"]), st.floats(0, 40), st.integers(0, 120)), max_size=60
)


@settings(max_examples=300, deadline=None)
@given(limits=LIMITS, events=EVENTS)
def test_no_window_exceeds_a_limit(limits, events):
    """A request that starts whenever it may, uses what it reserved, and ends at any time."""
    now, running, starts, paused = 0.0, [], [], 0.0
    for what, after, tokens in events:
        now += after
        if what == "start" and limits.wait_s(now, tokens) == 0:
            started = limits.start(now, tokens)
            running.append(started)
            starts.append(started)
            assert now >= paused
        elif what == "end" and running:
            limits.end(running.pop(tokens % len(running)), None)
        elif what == "pause":
            limits.pause(now, tokens / 4)
            paused = max(paused, now + tokens / 4)
        assert limits.running == len(running) <= limits.concurrency
    for first in starts:
        window = [each.tokens for each in starts if first.time <= each.time < first.time + WINDOW_S]
        assert not limits.requests or len(window) <= limits.requests
        assert not limits.tokens or sum(window) <= limits.tokens


@settings(max_examples=300, deadline=None)
@given(limits=LIMITS, events=EVENTS, tokens=st.integers(0, 1000))
def test_request_starts_after_its_wait(limits, events, tokens):
    """The wait is exact: a request may start after it, and not before."""
    now = 0.0
    for what, after, used in events:
        now += after
        if what == "start" and limits.wait_s(now, used) == 0:
            limits.end(limits.start(now, used), 3 * used)  # more than it reserved
        elif what == "pause":
            limits.pause(now, used / 4)
    waited = 0
    while (wait_s := limits.wait_s(now, tokens)) > 0:
        assert wait_s <= WINDOW_S + 1e-6
        assert limits.wait_s(now + 0.9 * wait_s, tokens) > 0
        now += wait_s + 1e-6
        waited += 1
        assert waited <= 2, "the end of a pause, then that of a window"
    limits.start(now, tokens)


def test_running_requests_bound_the_next():
    limits = RateLimits(concurrency=1)
    first = limits.start(0.0, 10)
    assert limits.wait_s(100.0, 10) == math.inf
    with pytest.raises(RuntimeError, match="too early"):
        limits.start(100.0, 10)
    limits.end(first, 10)
    assert limits.wait_s(100.0, 10) == 0.0


def test_used_tokens_replace_the_reservation():
    limits = RateLimits(concurrency=9, tokens=100)
    limits.end(limits.start(0.0, 90), 20)
    assert limits.wait_s(1.0, 80) == 0.0
    assert limits.wait_s(1.0, 81) == WINDOW_S - 1.0


def test_longer_pause_counts():
    limits = RateLimits(concurrency=9)
    limits.pause(0.0, 30.0)
    limits.pause(1.0, 2.0)
    assert limits.wait_s(5.0, 1) == 25.0
