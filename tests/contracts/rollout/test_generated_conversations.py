"""Generated conversations through the gateway: rows are what the engine was sent and returned.

Retries, busy servers, lost replies, several samples of a turn, stop strings that the agent writes again, and calls.
"""

import asyncio
from random import Random

import httpx
import pytest

from realsys.rollout.episode_session import Calls, EpisodeSession
from tests.support.conversations.over_http import ROUTES, Agent, Engine
from tests.support.serving.gateways import BOUND_S, TICKET, Scripted, opened

CONVERSATIONS = 80  # on each route
AT_ONCE = 16


@pytest.mark.parametrize("kind", ROUTES)
def test_rows_are_what_the_engine_saw(tokenizer, kind):
    async def play(gateway, spec, client, number, places):
        engine = Engine(tokenizer, Random(f"{kind} {number}"))
        calls = Calls(engine, TICKET, spec)
        session = EpisodeSession(calls, number, gateway)
        agent = Agent(session, engine, client, kind)
        async with places:
            await agent.play()
        await session.close()
        await calls.close()
        return agent.problems

    async def run():
        async with opened(Scripted(tokenizer), tokenizer) as first, httpx.AsyncClient(timeout=BOUND_S) as client:
            common = first.gateway, first.session.spec, client
            places = asyncio.Semaphore(AT_ONCE)
            return await asyncio.gather(*(play(*common, number, places) for number in range(CONVERSATIONS)))

    problems = asyncio.run(run())
    assert {number: found for number, found in enumerate(problems) if found} == {}
