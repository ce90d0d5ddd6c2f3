"""Whole episodes of agents with base_url: rows of a group, tool calls, hidden failures, calls after the end."""

import asyncio

import openai
import pytest

from realsys.data.prompts import Prompt
from realsys.errors import GenerationError
from realsys.generation.client import SamplingSpec
from realsys.rollout.agents.captured import CapturedAgent
from realsys.rollout.agents.contract import AgentParts
from realsys.rollout.group_player import GroupPlayer, PlayerExtras, group_player
from realsys.types import Episode, Ticket
from tests.contracts.rollout.test_gateway_delivery import with_script
from tests.support.serving.gateways import TICKET, USER, over_server, post

PROMPT = Prompt("1+1=", "2", [2, 10, 4])
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class Talk:
    """An agent with OpenAI's SDK. It keeps its last address, and may hide the errors of its calls."""

    def __init__(self, turns=2, hides=False):
        self._turns, self._hides = turns, hides
        self.base_urls = []

    async def run(self, task, session):
        self.base_urls.append(session.base_url)
        messages = [USER]
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
            for _ in range(self._turns):
                try:
                    reply = await client.chat.completions.create(model="m", messages=messages)
                except openai.APIError:
                    if not self._hides:
                        raise
                    break
                messages += [reply.choices[0].message.model_dump(), USER]
        return Episode(session.capture.rows(), 1.0, True, session.capture.metrics())


def player_of(episode, agent, tokenizer):
    return group_player(episode.config, agent, episode.engine, tokenizer.eos_token_ids, episode.gateway)


def test_group_has_one_row_per_linear_episode(server, tokenizer):
    async def run():
        async with over_server(server, tokenizer, "train.microbatch_tokens=1000") as episode:
            agent = Talk(turns=3)
            played = await player_of(episode, agent, tokenizer).play(TICKET, PROMPT)
            assert [len(each.rows) for each in played.episodes] == [1, 1] and not played.errors
            rows = [row for each in played.episodes for row in each.rows]
            sampled = sum(len(completion.tokens) for _, completion in episode.engine.returned)
            assert sum(row.loss_tokens for row in rows) == sampled and len(set(agent.base_urls)) == 2
            reply = await openai_error(agent.base_urls[0])
            assert reply.status_code == 410 and episode.gateway.counts()["gateway_calls"] == 6

    asyncio.run(run())


async def openai_error(base_url):
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(model="m", messages=[USER])
    await client.close()
    return caught.value


def test_failure_that_the_agent_hides_fails_the_episode(tokenizer):
    """`error-is-not-data`: the reward of an agent that did not get its completion is none."""

    async def body(episode, engine):
        with pytest.raises(GenerationError, match="no server can"):
            await player_of(episode, Talk(hides=True), tokenizer).play(TICKET, PROMPT)

    with_script(tokenizer, body, errors=lambda: [GenerationError("no server can") for _ in range(4)])


def test_tool_call_and_its_result_extend_the_row(tokenizer):
    async def body(episode, engine):
        sdk = episode.sdk()
        reply = await sdk.chat.completions.create(model="m", messages=[USER], tools=[TOOL])
        choice = reply.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content in (None, "")
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a":1,"b":1}')
        turns = [USER, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "2"}]
        await sdk.chat.completions.create(model="m", messages=turns, tools=[TOOL])
        (row,) = episode.session.capture.rows()
        sampled = row.tokens[row.loss_mask].tolist()
        assert tokenizer.decode(sampled) == f"{CALL}<|im_end|>2<|im_end|>"
        assert "<tool_response>2</tool_response>" in tokenizer.decode(row.tokens.tolist())

    with_script(tokenizer, body, "generation.sampling.max_new_tokens=100", texts=lambda: [CALL, "2"])


def test_streamed_tool_call_is_whole(tokenizer):
    async def body(episode, engine):
        sdk = episode.sdk()
        async with sdk.chat.completions.stream(model="m", messages=[USER], tools=[TOOL]) as stream:
            final = await stream.get_final_completion()
        (call,) = final.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a":1,"b":1}')

    with_script(tokenizer, body, "generation.sampling.max_new_tokens=100", texts=lambda: [CALL])


def test_evaluation_samples_with_the_settings_of_its_set(tokenizer):
    async def body(episode, engine):
        extras = PlayerExtras({"hard": SamplingSpec(temperature=0.0, max_new_tokens=7)}, episode.gateway)
        player = GroupPlayer(Talk(turns=1), episode.engine, SamplingSpec(), 1000, extras=extras)
        await player.play(Ticket("18", 0, 0, kind="eval", set="hard"), PROMPT)
        await player.play(Ticket("19", 0, 0), PROMPT)
        settings = [(call.spec.temperature, call.spec.max_new_tokens) for call in episode.engine.calls]
        assert settings == [(0.0, 7), (1.0, 128)]

    with_script(tokenizer, body)


def test_native_calls_and_base_url_share_the_bounds(tokenizer):
    """Both count as tokens of the episode."""

    async def body(episode, engine):
        await episode.session.generate([5, 6])
        reply = await post(episode, "chat/completions", {"messages": [USER]})
        assert reply.json()["error"]["code"] == "episode_limit_reached"

    with_script(tokenizer, body, "rollout.gateway.max_sampled_tokens=2")


def test_captured_agent_scores_what_it_received(tokenizer):
    """The agent of a user's run: rewards by the id of a completion."""

    class Runs:
        async def __call__(self, data, base_url, api_key, time):
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
                reply = await client.chat.completions.create(model="m", messages=[USER])
            return {"reward": 1.0, "rewards": {reply.id: 0.25}}

        async def close(self):
            pass

    async def body(episode, engine):
        agent = CapturedAgent(AgentParts(episode.config, tokenizer, None), Runs())
        played = await player_of(episode, agent, tokenizer).play(TICKET, PROMPT)
        for each in played.episodes:
            (row,) = each.rows
            assert each.reward == 1.0 and row.rewards == ((len(row.tokens) - 1, 0.25),)

    with_script(tokenizer, body, "train.microbatch_tokens=1000")
