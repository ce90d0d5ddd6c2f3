"""`stuck-costs-itself`: an episode that does not end fails after its time, whatever it does."""

import asyncio
import threading

import pytest
import uvloop

from realsys.config.schema_rollout import RolloutConfig
from realsys.errors import AgentError
from realsys.rollout.agents import captured, contract
from realsys.rollout.agents.captured import Inside
from realsys.rollout.agents.contract import EpisodeTime
from tests.support.harness import user_agents


def inside(run, episode=0.2, **settings):
    return Inside(run, RolloutConfig(agent_limits={"episode_timeout_s": episode}, **settings))


def call(agent, data, episode=0.2):
    return agent(data, "http://x/v1", "key", EpisodeTime(episode))


def play(agent):
    async def run():
        try:
            return await call(agent, {})
        finally:
            await agent.close()

    return asyncio.run(run())


class Clock:
    """Clock of an event loop, which the test advances."""

    now_s = 1000.0

    def __call__(self):
        return self.now_s


def play_all(agent, rows, episode=0.2, clock=None):
    """Play one episode per row at the same time; errors are results."""

    async def run():
        if clock is not None:
            asyncio.get_running_loop().time = clock
        plays = [call(agent, row, episode) for row in rows]
        try:
            return await asyncio.gather(*plays, return_exceptions=True)
        finally:
            await agent.close()

    return asyncio.run(run())


def test_result_in_time_is_returned():
    async def run():
        return await EpisodeTime(30.0).bound(asyncio.sleep(0, "done"))

    assert asyncio.run(run()) == "done"


def test_works_of_an_episode_share_its_time():
    """The second one has what the first one leaves: nothing."""

    async def run():
        time = EpisodeTime(0.05)
        for _ in range(2):
            with pytest.raises(AgentError, match="episode_timeout_s=0.05"):
                await time.bound(asyncio.sleep(1000))

    asyncio.run(run())


def test_endless_loop_ends_with_its_time():
    with pytest.raises(AgentError, match=r"rollout.agent_limits.episode_timeout_s=0.2"):
        play(inside(user_agents.loops))


def test_agent_that_catches_cancellation_is_left_behind(monkeypatch, caplog):
    monkeypatch.setattr(contract, "_CANCEL_S", 0.05)

    async def run():
        stop = asyncio.Event()
        with pytest.raises(AgentError, match="did not end"):
            await call(inside(user_agents.catches_cancellation), {"stop": stop})
        (left,) = contract._left_behind
        stop.set()
        await left

    asyncio.run(run())
    assert "continues after its cancellation" in caplog.text


@pytest.mark.parametrize("run_of_agent", [user_agents.sleeps_in_async, user_agents.sleeps_in_a_task])
def test_agent_that_blocks_the_worker_fails_alone(run_of_agent, monkeypatch):
    monkeypatch.setattr(captured, "BLOCKED_S", 0.2)

    async def run():
        agent = inside(run_of_agent, episode=30.0)
        try:
            plays = [call(agent, {"s": seconds}, 30.0) for seconds in (20.0, 0.0)]
            return await asyncio.gather(*plays, return_exceptions=True)
        finally:
            await agent.close()

    blocked, other = uvloop.run(run())  # the RolloutWorker's event loop
    assert isinstance(blocked, AgentError) and "for more than 0.2 s" in str(blocked)
    assert other == 1.0


def test_cancelled_episode_cancels_its_agent():
    async def run():
        ended = asyncio.Event()

        async def work():
            try:
                await asyncio.sleep(1000)
            finally:
                ended.set()

        task = asyncio.create_task(EpisodeTime(1000.0).bound(work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(run())


def test_episodes_share_one_http_client():
    async def run():
        agent = inside(user_agents.client_of)
        both = await asyncio.gather(*(call(agent, {}) for _ in range(2)))
        await agent.close()
        return both

    first, second = asyncio.run(run())
    assert first == second


def test_plain_function_inside_has_a_thread():
    answer = play(inside(user_agents.thread_of, agent_process="never"))
    assert answer["answer"].startswith("agent")
    assert answer["metrics"]["daemon"], "the worker's exit would wait for it"


def test_wait_for_a_thread_takes_no_time_of_the_episode(monkeypatch):
    monkeypatch.setattr(captured, "PLACES", 1)
    clock = Clock()
    agent = inside(user_agents.takes_time, episode=2.0, agent_process="never")
    assert play_all(agent, [{"clock": clock}] * 12, 2.0, clock) == [1.0] * 12
    assert clock.now_s > 1002.0


def test_episode_fails_when_no_thread_ends(monkeypatch):
    monkeypatch.setattr(captured, "PLACES", 1)
    stop = threading.Event()
    agent = inside(user_agents.waits, agent_process="never")
    first, second = play_all(agent, [{"stop": stop}] * 2)
    stop.set()
    assert "episode_timeout_s=0.2" in str(first)
    assert "none of its threads ended" in str(second)
