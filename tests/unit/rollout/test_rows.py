"""token-identity: rows equal, token for token, what the engine was sent and what it returned."""

import asyncio
import dataclasses
import random
from collections import defaultdict

import numpy as np
import pytest

from realsys.data.prompts import Prompt
from realsys.errors import GenerationError
from realsys.generation.client import SamplingSpec
from realsys.generation.completion import Completion
from realsys.manager.messages import ScheduleReply
from realsys.rollout import resumable_engine
from realsys.rollout.episodes import RowBuilder
from realsys.rollout.group_player import GroupPlayer
from realsys.rollout.resumable_engine import ResumableEngine
from realsys.types import Episode, Ticket

GROUPS, EPISODES = 2500, 4  # 10,000 conversations
SPEC = SamplingSpec(max_new_tokens=4)


class Engine:
    """Servers that return random tokens, abort, and die; they log what they were sent and what they returned."""

    def __init__(self, rng):
        self.rng = rng
        self.log = []  # (rid, number of the completion, input, returned)

    async def schedule(self, request):
        return ScheduleReply(self.rng.choice("ab"), "", 0)

    async def generate(self, url, input_ids, spec, *, rid, seed, received=None):
        if self.rng.random() < 0.005:
            raise GenerationError("died", retryable=True)
        segments = []
        for number in range(spec.n):
            cut = spec.max_new_tokens > 1 and self.rng.random() < 0.1
            count = self.rng.randint(1, spec.max_new_tokens - cut)
            tokens = np.array([self.rng.randrange(1000) for _ in range(count)], np.int32)
            logprobs = np.array([-self.rng.random() for _ in range(count)], np.float32)
            versions = np.full(count, self.rng.randrange(5), np.int32)
            segments.append(Completion(tokens, logprobs, versions, "abort" if cut else "stop"))
            self.log.append((rid, number, list(input_ids), segments[-1]))
        return segments


class Wanderer:
    """Goes on, adds context, branches and rewrites history at random; notes which row each call went to."""

    def __init__(self, rng):
        self.rng = rng
        self.row_of = {}  # (ticket, episode, call) -> number of the row
        self.episodes = {}

    async def run(self, task, session):
        rows, calls = [RowBuilder(task.prompt.ids)], 0
        while calls == 0 or (calls < 8 and self.rng.random() < 0.5):
            number = self.rng.randrange(len(rows))
            if self.rng.random() < 0.25:
                rows.append(rows[number].branch() if self.rng.random() < 0.6 else RowBuilder([7, 7]))
                number = len(rows) - 1
            if self.rng.random() < 0.5:
                rows[number].context([self.rng.randrange(1000) for _ in range(self.rng.randrange(4))])
            self.row_of[task.ticket.ticket_id, task.episode, calls] = number
            calls += 1
            rows[number].completion(await session.generate(rows[number].tokens))
        made = Episode([row.row() for row in rows], 0.0)
        self.episodes[task.ticket.ticket_id, task.episode] = made
        return made


def test_rows_of_random_conversations_match_engine_input(monkeypatch):
    monkeypatch.setattr(resumable_engine, "FIRST_DELAY_S", 0.0)
    rng = random.Random(5)
    engine, agent = Engine(rng), Wanderer(rng)
    player = GroupPlayer(agent, ResumableEngine(engine, engine), SPEC, 10**6)

    async def play(number):
        prompt = Prompt("", "", [rng.randrange(1000) for _ in range(rng.randint(1, 3))])
        played = await player.play(Ticket(str(number), 0, 0, n=EPISODES, seed=number), prompt)
        assert len(played.episodes) == EPISODES

    async def body():
        for number in range(0, GROUPS, 10):
            await asyncio.gather(*(play(number + k) for k in range(10)))

    asyncio.run(body())
    trained = defaultdict(set)
    for rid, number, sent, returned in engine.log:
        ticket, _, episode, call, _, *index = rid.split(".")
        key = ticket, int(episode) + int(index[0] if index else number)
        place = agent.row_of[*key, int(call)]
        check_row(agent.episodes[key].rows[place], sent, returned)
        span = set(range(len(sent), len(sent) + len(returned.tokens)))
        assert not span & trained[*key, place], "sampled twice"
        trained[*key, place] |= span
    assert len(agent.episodes) == GROUPS * EPISODES
    for key, episode in agent.episodes.items():
        for place, row in enumerate(episode.rows):
            assert set(np.flatnonzero(row.loss_mask).tolist()) == trained[*key, place]


def check_row(row, sent, returned):
    end = len(sent) + len(returned.tokens)
    assert row.tokens[:end].tolist() == sent + returned.tokens.tolist()
    assert row.loss_mask[len(sent) : end].all()
    first = int(row.loss_mask[: len(sent)].sum())
    span = slice(first, first + len(returned.tokens))
    assert (row.logprobs[span] == returned.logprobs).all() and (row.versions[span] == returned.versions).all()


def generated(*tokens, reason="stop", route=(("a", 2),)):
    count = len(tokens)
    array = np.array(tokens, np.int32)
    return Completion(array, np.full(count, -0.5, np.float32), np.full(count, 3, np.int32), reason, route)


def test_row_holds_context_and_completions_in_order():
    builder = RowBuilder([1, 2])
    builder.completion(generated(5, 6))
    builder.context([8])
    builder.completion(generated(9, 10, reason="length", route=(("a", 1), ("b", 1))))
    builder.reward(0.25)
    row = builder.row()
    assert row.tokens.tolist() == builder.tokens == [1, 2, 5, 6, 8, 9, 10] and len(builder) == 7
    assert row.loss_mask.tolist() == [False, False, True, True, False, True, True]
    assert (row.finish_reason, row.route, row.rewards) == ("length", (("a", 3), ("b", 1)), ((6, 0.25),))
    assert [a.dtype for a in (row.tokens, row.loss_mask, row.logprobs, row.versions)] == ["i4", "?", "f4", "i4"]


def test_row_has_versions_of_keys_if_a_completion_has():
    """Those of the other completions are their versions."""
    builder = RowBuilder([1])
    builder.completion(generated(5, 6))
    assert builder.row().kv_versions is None and builder.row().kept_tokens == 0
    builder.completion(dataclasses.replace(generated(7, 8, 9), kv_versions=np.array([2, 2, 3], np.int32)))
    row = builder.row()
    assert row.kv_versions.tolist() == [3, 3, 2, 2, 3] and row.kv_versions.dtype == np.int32
    assert row.kept_tokens == 2


def test_row_has_temperatures_if_a_completion_has():
    """0 stands for the temperature of the trial."""
    builder = RowBuilder([1])
    builder.completion(generated(5, 6))
    assert builder.row().temperatures == ()
    builder.completion(dataclasses.replace(generated(7, 8, 9), temperature=0.5))
    builder.completion(dataclasses.replace(generated(4), temperature=0.5))
    assert builder.row().temperatures == ((0.0, 2), (0.5, 4))


def test_greedy_completion_is_context():
    builder = RowBuilder([1])
    builder.completion(dataclasses.replace(generated(5, 6), temperature=0.0))
    with pytest.raises(ValueError, match="right after completion"):
        builder.reward(1.0)
    builder.completion(generated(7))
    assert (builder.tokens, builder.row().loss_mask.tolist()) == ([1, 5, 6, 7], [False, False, False, True])


def test_branch_trains_only_its_own_tokens():
    builder = RowBuilder([1])
    builder.completion(generated(5, 6))
    branch = builder.branch()
    branch.context([7])
    branch.completion(generated(8, 9))
    assert branch.row().tokens.tolist() == [1, 5, 6, 7, 8, 9] and branch.row().loss_tokens == 2
    assert builder.row().tokens.tolist() == [1, 5, 6] and builder.row().loss_tokens == 2


def test_route_is_empty_if_a_completion_has_none():
    builder = RowBuilder([1])
    builder.completion(generated(5, 6))
    builder.completion(generated(7, route=()))
    assert builder.row().route == ()


def test_reward_needs_a_sampled_token_before_it():
    builder = RowBuilder([1])
    with pytest.raises(ValueError, match="right after completion"):
        builder.reward(1.0)
    builder.completion(generated(route=()))
    with pytest.raises(ValueError, match="right after completion"):
        builder.reward(1.0)
