"""The doors rollout.environment and data.verifier: what a judgement is made of, and the examples of the docs."""

import asyncio
from pathlib import Path

import pytest

from realsys.config.machine import Machine
from realsys.config.rules import check
from realsys.data.prompts import Prompt
from realsys.errors import ConfigError, RewardError
from realsys.reward.pool import ItemLimits, VerifierPool
from realsys.reward.verifiers.contract import Verdict
from realsys.rollout.environments import Judgement, Response, Task, build
from realsys.types import Ticket
from tests.support.processes.config_trees import changed

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"
MACHINE = Machine(cpus=8, memory_bytes=64 << 30)
REWARDS = ["rollout.reward.correct=5", "rollout.reward.wrong=-5"]
PROGRAM = "```python\na, b = input().split()\nprint(int(a) + int(b))\n```"


class Answers:
    """In the place of the pool, for verdicts that no built-in verifier gives."""

    def __init__(self, verdict):
        self.verdict = verdict
        self.asked = []

    async def verify(self, name, item):
        self.asked.append((name, item))
        return self.verdict


class Unclosed:
    """An environment with steps that frees nothing."""

    async def reset(self, task): ...

    async def step(self, task, response): ...


class Blocking(Unclosed):
    """An environment with steps whose reset is not async."""

    def reset(self, task): ...

    async def close(self, task): ...


def made(parts):
    return Blocking()


def test_function_cannot_make_an_environment_with_steps():
    """The launcher would not see that it has them."""
    with pytest.raises(ConfigError, match="without judge: name the class itself"):
        build(changed(f"rollout.environment={__name__}:made"), None, None)


def task(answer="3", **extra):
    return Task(Prompt("a1b2=", answer, [1], extra), Ticket("7", 0, 0))


def judged(pool, response, *overrides, of=None):
    return asyncio.run(build(changed(*REWARDS, *overrides), None, pool).judge(of or task(), response))


def judged_by_processes(responses, of, *overrides):
    """Judgements of the real pool."""

    async def run():
        pool = VerifierPool(1, ItemLimits(20.0, 20.0))
        try:
            environment = build(changed(*REWARDS, *overrides), None, pool)
            async with asyncio.timeout(120):
                calls = (environment.judge(of, response) for response in responses)
                return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await pool.close()

    return asyncio.run(run())


@pytest.fixture
def examples(monkeypatch):
    """As with PYTHONPATH=docs/examples; the verifier processes inherit it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))


@pytest.mark.parametrize(
    ("verdict", "reward"),
    [
        (Verdict(correct=True), 5.0),
        (Verdict(correct=False), -5.0),
        (Verdict(0.25, True), 0.25),
        (Verdict(0.0, None), 0.0),
        (Verdict(1.0, False, {"steps": 2.0}), 1.0),
        (Verdict(correct=True, bonus=0.5), 5.5),
        (Verdict(0.25, bonus=-1.0), -0.75),
    ],
)
def test_verdict_becomes_reward(verdict, reward):
    judgement = judged(Answers(verdict), Response("x", "stop", 1))
    assert judgement == Judgement(reward, verdict.correct, verdict.metrics)


def test_verifier_gets_row_and_completion():
    pool = Answers(Verdict(correct=True))
    judged(pool, Response("#3", "stop", 2), of=task(level=4))
    ((name, item),) = pool.asked
    assert (name, item.prompt, item.completion, item.answer, item.extra) == ("exact", "a1b2=", "#3", "3", {"level": 4})


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_cut_off_completion_is_wrong_unasked(reason):
    pool = Answers(Verdict(correct=True))
    assert judged(pool, Response("#3", reason, 2)) == Judgement(-5.0, False) and not pool.asked


@pytest.mark.processes
def test_undecidable_completion_has_no_judgement():
    responses = [Response("#3", "stop", 2), Response("raise", "stop", 1), Response("3", "stop", 1)]
    verifier = "data.verifier=tests.support.serving.reward_verifiers:behave"
    right, failed, wrong = judged_by_processes(responses, task("#3"), verifier)
    assert (right.correct, wrong.correct) == (True, False)
    assert isinstance(failed, RewardError) and "ArithmeticError" in str(failed)


@pytest.mark.parametrize(
    ("overrides", "field", "problem"),
    [
        (["rollout.environment=nothing"], "rollout.environment", "use one of verifier, or package.module:name"),
        (["rollout.environment=nowhere:Judge"], "rollout.environment", "no module named 'nowhere'"),
        ([f"rollout.environment={__name__}:Answers"], "rollout.environment", "lacks judge, or reset, step, close"),
        ([f"rollout.environment={__name__}:Unclosed"], "rollout.environment", "the class lacks close"),
        ([f"rollout.environment={__name__}:Blocking"], "rollout.environment", "reset must be async"),
        (["rollout.environment=guessing:Guessing"], "rollout.agent", "use multi_turn, or set plays_steps = True"),
        (
            ["rollout.environment=guessing:Guessing", "rollout.agent=captured_agent:run"],
            "rollout.agent",
            "does not play the steps of rollout.environment=guessing:Guessing",
        ),
        (["rollout.environment_args={bonus: 1}"], "rollout.environment_args", "do not fit verifier"),
        (
            ["rollout.environment=environment:ShortAnswers", "rollout.environment_args={bonuss: 1}"],
            "rollout.environment_args",
            "do not fit environment:ShortAnswers",
        ),
    ],
)
def test_bad_environment_is_refused_before_start(examples, overrides, field, problem):
    with pytest.raises(ConfigError) as caught:
        check(changed(*overrides), MACHINE)
    assert caught.value.field == field and problem in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.processes
def test_example_environment_pays_for_short_answers(examples):
    settings = ["rollout.environment=environment:ShortAnswers", "rollout.environment_args={bonus: 2.0}"]
    check(changed(*settings), MACHINE)
    responses = [Response("#3", "stop", 5), Response("#4", "stop", 5), Response("#3", "length", 20)]
    right, wrong, cut = judged_by_processes(responses, task(budget=20), *settings)
    assert right == Judgement(5.0 + 2.0 * 0.75, True, {"unused_budget": 0.75})
    assert wrong == Judgement(-5.0, False, {"unused_budget": 0.75})
    assert cut == Judgement(-5.0, False, {"unused_budget": 0.0})


@pytest.mark.processes
def test_example_verifier_gives_partial_credit(examples):
    settings = ["data.verifier=verifier:tests_passed"]
    check(changed(*settings), MACHINE)
    row = task("-", tests=[{"input": "2 3", "output": "5"}, {"input": "2 x", "output": "2x"}])
    responses = [Response(PROGRAM, "stop", 9), Response("no program", "stop", 2)]
    half, none = judged_by_processes(responses, row, *settings)
    assert half == Judgement(0.5, False, {"has_program": 1.0, "tests_passed": 0.5})
    assert none == Judgement(0.0, False, {"has_program": 0.0})
    (failed,) = judged_by_processes(responses[:1], task("-"), *settings)
    assert isinstance(failed, RewardError) and "KeyError: 'tests'" in str(failed)
