"""``train.ppo.filter.accept`` with a function of the user: what becomes of its group, also if it fails or hangs."""

import asyncio
import logging
import sys
import threading
from dataclasses import replace

import pytest

from realsys.config.schema_train import FilterConfig
from realsys.data.prompts import Prompt
from realsys.errors import AgentError, RewardError, StuckError
from realsys.generation.client import SamplingSpec
from realsys.manager.ledger.tickets import label
from realsys.rollout.group_player import GroupPlayer, GroupRules, PlayerExtras, group_rules
from realsys.types import Ticket
from tests.support.processes.config_trees import changed
from tests.support.serving.rollout_fakes import FakeEngine, ScriptedAgent

PROMPT = Prompt("a1=", "1", [2, 10, 4])


def player(accept, monkeypatch, timeout_s=60.0, extras=None):
    """Return a player whose filter is ``accept``."""
    monkeypatch.setattr(sys.modules[__name__], "accept", accept, raising=False)
    rules = GroupRules(filter=FilterConfig(accept=f"{__name__}:accept"), timeout_s=timeout_s)
    return GroupPlayer(ScriptedAgent(), FakeEngine(), SamplingSpec(max_new_tokens=9), 1000, rules, extras)


def play(group, kind="train"):
    async def body():
        async with asyncio.timeout(60):
            return await group.play(Ticket("17", 2, 0, kind=kind, n=3, seed=400), PROMPT)

    return asyncio.run(body())


def test_accepted_group_is_trained(monkeypatch):
    seen = []
    group = player(lambda episodes: seen.append([each.reward for each in episodes]) or True, monkeypatch)
    played = play(group)
    assert seen == [[0.0, 1.0, 2.0]] and len(played.episodes) == 3 and played.dropped == ""
    assert group.take_lost_tokens() == {}


def test_refused_group_is_counted_under_its_short_reason(monkeypatch):
    group = player(lambda episodes: "x" * 60 + f": {len(episodes)} episodes\n", monkeypatch)
    played = play(group)
    assert played.dropped == "x" * 60 + ": 3 episodes" and (played.episodes, len(played.unused)) == ([], 3)
    assert group.take_lost_tokens() == {"x" * 48: [3, 3, 3]} and label(played.dropped) == "x" * 48


def test_evaluation_does_not_ask_the_filter(monkeypatch):
    assert len(play(player(lambda episodes: 1 / 0, monkeypatch), kind="eval").episodes) == 3


def misspelt(episodes):
    return episodes[0].rewards


def rejects(episodes):
    raise RewardError("own error of the filter")


def stops(episodes):
    raise StopIteration


def exits(episodes):
    sys.exit(3)


def cancels(episodes):
    raise asyncio.CancelledError


@pytest.mark.parametrize("accept", [misspelt, rejects, stops, exits, cancels])
def test_filter_that_raises_fails_its_group_with_the_place(accept, monkeypatch, caplog):
    """A RewardError, too: it would end the ticket as one without a verdict."""
    dropped = Dropped()
    group = player(accept, monkeypatch, extras=PlayerExtras(dropped=dropped))
    with pytest.raises(AgentError, match=rf"filter.accept={__name__}:accept: .*{__file__}:\d+") as caught:
        play(group)
    assert "\n" not in str(caught.value) and group.take_lost_tokens() == {"failed": [3, 3, 3]}
    assert [record.levelno for record in caplog.records] == [logging.ERROR] and caplog.records[0].exc_info
    assert dropped.reasons == [f"AgentError: {caught.value}"]
    with pytest.raises(StuckError, match="two groups in a row failed with the same error"):
        play(group)
    assert len(caplog.records) == 1, "logged once"


def test_group_in_between_shows_that_the_filter_works(monkeypatch):
    answers = [None, True, None]
    group = player(lambda episodes: answers.pop(0), monkeypatch)
    with pytest.raises(AgentError, match="it returned None"):
        play(group)
    assert play(group).dropped == ""
    with pytest.raises(AgentError, match="it returned None"):
        play(group)


def test_filter_that_hangs_fails_its_group_and_blocks_nothing(monkeypatch):
    """The event loop turns while the function hangs in its thread."""
    released, turns = threading.Event(), []
    group = player(lambda episodes: released.wait(60), monkeypatch, timeout_s=0.05)

    async def body():
        async with asyncio.timeout(60):
            playing = asyncio.create_task(group.play(Ticket("17", 2, 0, n=3, seed=400), PROMPT))
            while not playing.done():
                turns.append(await asyncio.sleep(0.001))
            await playing

    try:
        with pytest.raises(AgentError, match=r"did not end within rollout.agent_limits.episode_timeout_s=0.05"):
            asyncio.run(body())
    finally:
        released.set()
    assert turns


def test_limit_of_an_episode_bounds_the_filter():
    rules = group_rules(changed("rollout.agent_limits.episode_timeout_s=7"))
    assert rules == replace(rules, timeout_s=7.0)


class Dropped:
    """A store of dropped groups that keeps the reasons."""

    def __init__(self):
        self.reasons = []

    def add(self, ticket, prompt, reason, episodes, failed):
        self.reasons.append(reason)
