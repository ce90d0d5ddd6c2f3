"""Further episodes than a group needs, choice of its episodes by reward, and groups that are dropped."""

import asyncio
import itertools

import pytest

from realsys.config.schema_rollout import KeepConfig
from realsys.config.schema_train import FilterConfig
from realsys.data.prompts import Prompt
from realsys.errors import GenerationError
from realsys.generation.client import SamplingSpec
from realsys.rollout.episodes import RowBuilder
from realsys.rollout.group_player import GroupPlayer, GroupRules, PlayerExtras
from realsys.types import Episode, Ticket
from tests.support.serving.rollout_fakes import FakeEngine, ScriptedAgent

PROMPT = Prompt("a1=", "1", [2, 10, 4])
SPEC = SamplingSpec(max_new_tokens=9)


class Paced(ScriptedAgent):
    """An agent whose episodes end in the order ``finish``; the others wait for ever after their first call."""

    def __init__(self, finish, errors=None, rewards=None):
        super().__init__(errors=errors)
        self.turns = {episode: asyncio.Event() for episode in finish}  # episode -> it may end
        self.following = dict(itertools.pairwise(finish))
        self.turns[finish[0]].set()
        self.rewards = rewards or {}

    async def run(self, task, session):
        row = RowBuilder(task.prompt.ids)
        row.completion(await session.generate(row.tokens))
        await self.turns.get(task.episode, asyncio.Event()).wait()
        if task.episode in self.following:
            self.turns[self.following[task.episode]].set()
        if task.episode in self.errors:
            raise self.errors[task.episode]
        return Episode([row.row()], self.rewards.get(task.episode, float(task.episode)), None)


def sampled(agent, rules, n=5, engine=None, kind="train", dropped=None):
    """Play a ticket of ``n`` episodes; return what was played, and the lost tokens."""
    group = GroupPlayer(agent, engine or FakeEngine(), SPEC, 1000, rules, PlayerExtras(dropped=dropped))

    async def body():
        async with asyncio.timeout(60):
            return await group.play(Ticket("17", 2, 0, kind=kind, n=n, seed=400), PROMPT)

    return asyncio.run(body()), group.take_lost_tokens()


def rewards_of(played):
    return [episode.reward for episode in played.episodes]


def test_first_episodes_that_end_make_the_group():
    """Whatever their rewards; the tokens of the others are counted."""
    played, lost = sampled(Paced([4, 0, 2]), GroupRules(size=3))
    assert rewards_of(played) == [0.0, 2.0, 4.0] and played.errors == []
    assert lost == {"over_sampled": [3, 3]}


def test_failed_episode_costs_nothing_with_a_spare():
    played, lost = sampled(Paced([1, 4, 0, 2], errors={4: ValueError("x")}), GroupRules(size=3))
    assert rewards_of(played) == [0.0, 1.0, 2.0] and len(played.errors) == 1
    assert lost == {"failed": [3], "over_sampled": [3]}


def test_group_without_a_spare_left_fails():
    errors = {k: GenerationError("x") for k in (0, 1, 2)}
    with pytest.raises(GenerationError):
        sampled(Paced([0, 1, 2], errors=errors), GroupRules(size=3))


def test_cancelled_calls_count_their_tokens():
    """The engine hands over the tokens so far of a call that is cancelled."""

    class Streaming(FakeEngine):
        async def generate(self, call, deliver=None):
            for k in range(3):
                deliver(k, self.completion(call.seed + k))
            try:
                await asyncio.Event().wait()
            finally:
                for k in (3, 4):
                    deliver(k, self.completion(call.seed + k))

    played, lost = sampled(Paced([0, 1, 2]), GroupRules(size=3), engine=Streaming())
    assert rewards_of(played) == [0.0, 1.0, 2.0]
    assert lost == {"over_sampled": [3, 3]}


def test_dropped_group_has_no_episodes_to_train():
    rules = GroupRules(size=3, filter=FilterConfig(accept="unequal_rewards"))
    played, lost = sampled(Paced([0, 1, 2], rewards=dict.fromkeys(range(5), 1.0)), rules)
    assert (played.dropped, played.episodes, len(played.unused)) == ("equal_rewards", [], 3)
    assert lost == {"equal_rewards": [3, 3, 3], "over_sampled": [3, 3]}


def test_unkept_episodes_are_counted():
    rules = GroupRules(keep=KeepConfig(episodes=2))
    played, lost = sampled(Paced([0, 1, 2]), rules, n=3)
    assert rewards_of(played) == [0.0, 2.0] and [episode.reward for episode in played.unused] == [1.0]
    assert lost == {"not_kept": [3]}


def test_evaluation_is_neither_filtered_nor_cut():
    rules = GroupRules(size=1, filter=FilterConfig(accept="unequal_rewards"), keep=KeepConfig(episodes=1))
    played, lost = sampled(Paced([1, 0]), rules, n=2, kind="eval")
    assert (rewards_of(played), played.dropped, lost) == ([0.0, 1.0], "", {})


class Dropped:
    """A store of dropped groups that keeps its calls: (reason, its episodes, errors of the failed ones)."""

    def __init__(self):
        self.groups = []

    def add(self, ticket, prompt, reason, episodes, failed):
        self.groups.append((reason, sorted(episodes), {number: error for number, (error, _) in failed.items()}))
        self.last_calls = {number: call for number, (_, call) in failed.items()}


def test_group_without_signal_goes_to_the_store():
    dropped = Dropped()
    rules = GroupRules(filter=FilterConfig(accept="unequal_rewards"))
    agent = Paced([0, 1], rewards={0: 1.0, 1: 1.0})
    assert sampled(agent, rules, n=2, dropped=dropped)[0].dropped == "equal_rewards"
    assert dropped.groups == [("equal_rewards", [0, 1], {})]
    sampled(Paced([0, 1]), rules, n=2, dropped=dropped)  # other rewards: trained
    sampled(Paced([0, 1], rewards={0: 1.0, 1: 1.0}), rules, n=2, kind="eval", dropped=dropped)
    assert len(dropped.groups) == 1


def test_failed_episode_goes_to_the_store_with_its_call():
    """Of a group that is trained with the others, and of one that fails as a whole."""
    dropped = Dropped()
    agent = Paced([0, 1, 2], errors={1: ValueError("hung")})
    sampled(agent, GroupRules(min_episodes=2), n=3, dropped=dropped)
    [(reason, episodes, errors)] = dropped.groups
    assert (reason, episodes, list(errors)) == ("", [0, 2], [1]) and "hung" in errors[1]
    before, completion = dropped.last_calls[1]
    assert list(before) == PROMPT.ids and len(completion.tokens) == 3
    with pytest.raises(GenerationError):
        sampled(Paced([0], errors={0: GenerationError("x")}), GroupRules(), n=1, dropped=dropped)
    assert dropped.groups[1] == ("GenerationError: x", [], {0: "GenerationError: x"})
