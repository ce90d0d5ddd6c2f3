"""`closed-once`: an episode whose reset was called is closed once, however it ends."""

import asyncio

import pytest

from realsys.data.prompts import Prompt
from realsys.errors import AgentError, RewardError
from realsys.generation.client import SamplingSpec
from realsys.rollout import environments
from realsys.rollout.agents.contract import Bounded
from realsys.rollout.environments import Judgement, Response, StepEnvironment, Task
from realsys.rollout.group_player import GroupPlayer, GroupRules
from realsys.types import Ticket
from tests.support.serving.rollout_fakes import FakeEngine, Game, ScriptedAgent

PROMPT = Prompt("a1=", "1", [2, 10, 4])
RESPONSE = Response("x", "stop", 1)


class Player(ScriptedAgent):
    """An agent that resets, steps and samples; ``stuck`` episodes wait for ever after their reset."""

    def __init__(self, environment, stuck=(), errors=None):
        super().__init__(errors=errors)
        self.environment, self.stuck = environment, stuck

    async def run(self, task, session):
        await self.environment.reset(task)
        if task.episode in self.stuck:
            await asyncio.Event().wait()
        await self.environment.step(task, RESPONSE)
        return await super().run(task, session)


def play(game, n=3, timeout_s=60.0, rules=None, **settings):
    """Play a ticket of episodes with a game of the user."""
    environment = StepEnvironment(game, "mine:Game")
    agent = Bounded(Player(environment, **settings), timeout_s, environment)
    group = GroupPlayer(agent, FakeEngine(), SamplingSpec(max_new_tokens=9), 1000, rules or GroupRules(1))

    async def body():
        async with asyncio.timeout(60):
            try:
                return await group.play(Ticket("17", 2, 0, n=n, seed=400), PROMPT)
            finally:
                await agent.close()

    return asyncio.run(body())


def calls(game, word):
    return sorted(call for call in game.calls if call.startswith(word))


def game_of(*judgements):
    return Game(None, None, judgements or [Judgement(1.0)] * 9)


CLOSED = ["close 0", "close 1", "close 2"]


def test_every_episode_is_closed_once_at_its_end():
    game = game_of()
    assert len(play(game).episodes) == 3
    assert calls(game, "close") == CLOSED and len(calls(game, "reset")) == 3


def test_failed_episode_is_closed():
    game = game_of()
    assert len(play(game, errors={1: ValueError("x"), 2: RewardError("y")}).episodes) == 1
    assert calls(game, "close") == CLOSED


def test_episode_that_takes_too_long_is_closed():
    game = game_of()
    played = play(game, timeout_s=0.2, stuck={1})
    assert "episode_timeout_s" in played.errors[0] and calls(game, "close") == CLOSED


def test_cancelled_episode_is_closed():
    """The group is complete without it."""
    game = game_of()
    assert len(play(game, stuck={1}, rules=GroupRules(size=2)).episodes) == 2
    assert calls(game, "close") == CLOSED


def test_reset_that_fails_half_way_is_closed():
    class Half(Game):
        async def reset(self, task):
            await super().reset(task)
            if task.episode == 1:
                raise OSError("no browser")

    game = Half(None, None, [Judgement(1.0)] * 9)
    (error,) = play(game).errors
    assert "OSError: no browser" in error and __file__ in error and calls(game, "close") == CLOSED


def test_close_that_fails_is_named_and_changes_nothing(caplog):
    class Broken(Game):
        async def close(self, task):
            await super().close(task)
            raise KeyError("no sandbox")

    game = Broken(None, None, [Judgement(1.0)] * 9)
    played = play(game, n=5)
    assert len(played.episodes) == 5 and played.errors == [] and len(calls(game, "close")) == 5
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(" times")[0][-1] for line in lines] == ["1", "2", "4"], "not a line for each"
    assert "rollout.environment=mine:Game: close failed for" in lines[0] and f"({__file__}:" in lines[0]


@pytest.mark.parametrize("obeys", [True, False])
def test_close_that_hangs_is_bounded(monkeypatch, caplog, obeys):
    """Whether it ends when it is cancelled or not."""
    monkeypatch.setattr(environments, "CLOSE_S", 0.01)
    released = []

    class Hung(Game):
        async def close(self, task):
            await super().close(task)
            while not released:
                try:
                    await asyncio.sleep(0.001 if released else 30)
                except asyncio.CancelledError:
                    if obeys:
                        raise

    game = Hung(None, None, [Judgement(1.0)])
    environment = StepEnvironment(game, "mine:Game")

    async def body():
        task = Task(PROMPT, Ticket("17", 2, 0))
        await environment.reset(task)
        await environment.close(task)
        await environment.wait_closed()
        released.append(True)

    asyncio.run(body())
    assert ["did not end within 0.01 s" in record.getMessage() for record in caplog.records] == [True]


def test_cancellation_does_not_interrupt_a_close():
    """The group may be complete while an episode closes; the end of the worker waits for it."""
    begun, go_on, ended = asyncio.Event(), asyncio.Event(), []

    class Slow(Game):
        async def close(self, task):
            begun.set()
            await go_on.wait()
            ended.append(task.episode)

    async def body():
        environment = StepEnvironment(Slow(), "mine:Game")
        agent = Bounded(Player(environment, errors={0: ValueError("x")}), 60.0, environment)
        running = asyncio.create_task(agent.run(Task(PROMPT, Ticket("17", 2, 0)), None))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ended == []
        asyncio.get_running_loop().call_soon(go_on.set)
        await agent.close()
        assert ended == [0]

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize(
    ("observation", "judgement", "problem"),
    [
        (7, None, "reset returned 7: it must return a text or None"),
        (None, 0.5, "step returned 0.5: it must return a Judgement"),
        (None, Judgement(None), "its reward a number"),
    ],
)
def test_wrong_result_is_named(observation, judgement, problem):
    environment = StepEnvironment(Game(None, observation, [judgement]), "mine:Game")
    task = Task(PROMPT, Ticket("1", 0, 0))

    async def body():
        await environment.reset(task)
        await environment.step(task, RESPONSE)

    with pytest.raises(AgentError, match=f"rollout.environment=mine:Game: .*{problem}"):
        asyncio.run(body())


def test_agent_that_asks_for_a_judgement_is_told():
    with pytest.raises(AgentError, match="mine:Game has no judge: call reset, and step"):
        asyncio.run(StepEnvironment(Game(), "mine:Game").judge(Task(PROMPT, Ticket("1", 0, 0)), RESPONSE))


def test_second_reset_needs_a_close_in_between():
    environment, task = StepEnvironment(game := Game(), "mine:Game"), Task(PROMPT, Ticket("1", 0, 0))

    async def body():
        await environment.close(task)
        await environment.reset(task)
        with pytest.raises(AgentError, match="reset was called twice"):
            await environment.reset(task)
        await environment.close(task)
        await environment.close(task)
        await environment.reset(task)

    asyncio.run(body())
    assert game.calls == ["reset 0", "close 0", "reset 0"]
