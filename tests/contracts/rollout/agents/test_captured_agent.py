"""Agents with base_url over the real gateway: their calls become the rows of one Episode."""

import asyncio
from pathlib import Path

import pytest

from realsys.data.prompts import Prompt
from realsys.errors import AgentError, GenerationError
from realsys.rollout import agents
from realsys.rollout.environments import Judgement, Task
from tests.support.harness import clients
from tests.support.serving.gateways import TICKET, Scripted, opened, over_server

AGENT = "rollout.agent=tests.support.harness.clients:"
PROMPT = Prompt("1+1=", "2", [], {"level": 3})


class Judge:
    """An environment that tells what it judged."""

    async def judge(self, task, response):
        return Judgement(0.25, True, {"judged": 1.0}, answer=f"{response.turn} {response.text}")


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[4])


def play(place, tokenizer, name, *settings, judge=None):
    """Return one episode and what the engine returned. ``place``: the URL of an engine, or a scripted one."""

    async def run():
        over = over_server if isinstance(place, str) else opened
        async with over(place, tokenizer, f"{AGENT}{name}", *settings) as episode:
            agent = agents.build(episode.config, tokenizer, judge or Judge())
            try:
                return await agent.run(Task(PROMPT, TICKET), episode.session), episode.engine.returned
            finally:
                await agent.close()

    return asyncio.run(run())


def assert_one_row(row, returned):
    """Check that the row is the input of the last call and its completion, and that all completions are trained."""
    tokens, completion = returned[-1]
    assert len(returned) == clients.TURNS
    assert row.tokens.tolist() == tokens + completion.tokens.tolist()
    assert row.tokens[row.loss_mask].tolist() == [token for _, each in returned for token in each.tokens.tolist()]


def test_conversation_is_one_row_with_rewards_of_turns(server, tokenizer):
    episode, returned = play(server, tokenizer, "talks")
    (row,) = episode.rows
    assert_one_row(row, returned)
    ends = [len(tokens) + len(completion.tokens) - 1 for tokens, completion in returned]
    assert row.rewards == tuple(zip(ends, (1.0, 2.0, 3.0), strict=True))
    assert (episode.reward, episode.metrics["level"], episode.metrics["gateway/calls"]) == (0.0, 3.0, 3.0)


@pytest.mark.processes
def test_process_ends_in_the_same_episode(server, tokenizer):
    episode, returned = play(server, tokenizer, "talks_in_process")
    assert_one_row(episode.rows[0], returned)
    text = tokenizer.completion_text(returned[-1][1].tokens.tolist())
    assert (episode.reward, episode.correct, episode.answer) == (0.25, True, f"2 {text}")
    assert episode.metrics["judged"] == 1.0


def test_rewritten_history_is_a_further_row(server, tokenizer):
    episode, returned = play(server, tokenizer, "branches")
    assert len(episode.rows) == len(returned) == 2
    assert episode.metrics["gateway/branches"] == 1.0


class Hangs:
    """An environment that hangs, until the limit on its episode or on this test."""

    async def judge(self, task, response):
        async with asyncio.timeout(30.0):
            await asyncio.Event().wait()


SHORT = "rollout.agent_limits.episode_timeout_s=2"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("run", "settings", "errors", "error", "problem"),
    [
        ("hides_errors", [], [GenerationError("no server")], GenerationError, "no server"),
        # the judgement has what the run has left of the episode's time
        ("talks_for_the_judge", [SHORT], [], AgentError, "episode_timeout_s=2"),
        ("talks_in_process", [SHORT], [], AgentError, "episode_timeout_s=2"),
        ("never_calls", [], [], AgentError, "received no completion"),
    ],
)
def test_failed_episode_has_the_first_error(tokenizer, run, settings, errors, error, problem):
    judge = Hangs() if settings else None
    with pytest.raises(error, match=problem):
        play(Scripted(tokenizer, errors=list(errors)), tokenizer, run, *settings, judge=judge)


@pytest.mark.parametrize(
    ("settings", "calls", "code"),
    [
        (["rollout.agent_limits.max_turns=2"], 2, "episode_limit_reached"),
        (["rollout.agent_limits.max_tokens=100"], None, "context_length_exceeded"),
    ],
)
def test_bound_of_the_episode_is_told_to_the_agent(tokenizer, settings, calls, code):
    episode, returned = play(Scripted(tokenizer), tokenizer, "counts_calls", *settings)
    assert episode.answer == code and episode.metrics["calls"] == len(returned) >= 1
    assert calls in (None, len(returned))
    assert all(len(row.tokens) <= 100 for row in episode.rows) or calls


def test_messages_of_the_row_reach_the_agent(tokenizer):
    messages = [{"role": "user", "content": "1+1="}]
    data = agents.captured.data_of(Prompt("1+1=", "2", [], {"level": 3}, messages))
    assert data == {"prompt": messages, "answer": "2", "level": 3}
