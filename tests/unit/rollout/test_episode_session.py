"""The view of the engine that an episode has: the temperature of its completions."""

import asyncio

import pytest
from msgspec.structs import replace

from realsys.errors import AgentError
from realsys.generation.client import SamplingSpec
from realsys.rollout.episode_session import Calls, EpisodeSession
from realsys.rollout.episodes import RowBuilder, check_episode
from realsys.types import Episode, Ticket
from tests.support.serving.rollout_fakes import FakeEngine

TRIAL = SamplingSpec(max_new_tokens=9, temperature=0.75)


def sampled(trial=TRIAL, **changes):
    """Return a completion that was sampled with these changes of the trial's settings."""

    async def body():
        calls = Calls(FakeEngine(), Ticket("t", 0, 0), trial)
        try:
            return await EpisodeSession(calls, 0).generate([1], replace(trial, **changes) if changes else None)
        finally:
            await calls.close()

    return asyncio.run(body())


@pytest.mark.parametrize(
    ("changes", "temperature"),
    [
        ({}, None),
        ({"max_new_tokens": 3}, None),
        ({"temperature": 0.5}, 0.5),
        ({"temperature": 0.0}, 0.0),
        ({"top_k": 1}, 0.0),
        ({"top_k": 2}, None),
    ],
)
def test_completion_has_temperature_that_is_not_the_trials(changes, temperature):
    assert sampled(**changes).temperature == temperature


def test_greedy_trial_marks_no_completion():
    """Its own evaluation may be greedy: the tokens are those of its policy."""
    assert sampled(replace(TRIAL, temperature=0.0), top_k=1).temperature is None


def test_episode_with_greedy_calls_only_is_refused():
    completion = sampled(temperature=0.0)
    row = RowBuilder([1])
    row.completion(completion)
    with pytest.raises(AgentError, match="and a temperature above 0"):
        check_episode(Episode([row.row()], 1.0), 100, len(completion.tokens))


def test_streams_of_a_merged_call_stay_apart():
    """Episodes 0 and 2 listen, 1 does not; their first calls are one request."""

    class Telling(FakeEngine):
        async def generate(self, call, deliver=None):
            for k in range(call.spec.n):
                call.on_tokens(k, [call.seed + k])
            return await super().generate(call, deliver)

    async def body():
        engine = Telling()
        calls = Calls(engine, Ticket("t", 0, 0, seed=40), TRIAL)
        heard = {0: [], 2: []}
        listeners = [heard[k].extend if k in heard else None for k in range(3)]
        sessions = [EpisodeSession(calls, k) for k in range(3)]
        pairs = zip(sessions, listeners, strict=True)
        await asyncio.gather(*(session.generate([1], None, listener) for session, listener in pairs))
        await calls.close()
        assert len(engine.calls) == 1 and heard == {0: [40], 2: [42]}

    asyncio.run(body())
