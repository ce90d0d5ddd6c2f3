"""Streams of the gateway over the real engine: text as it is sampled, and the rows of a request without stream."""

import asyncio
import dataclasses
import json
import selectors
from collections import Counter

import httpx
import pytest
from safetensors.torch import load_file

from realsys.data.tokenizer import TextTokenizer
from realsys.generation.client import GenerationClient
from realsys.rollout.gateway import gateway, routes
from tests.support.gateway.replies import TOOL
from tests.support.serving.gateways import (
    BOUND_S,
    USER,
    PauseAfter,
    Scripted,
    chat_server,
    make_chain_model,
    opened,
    over_server,
)
from tests.support.serving.generation_servers import publish
from tests.support.serving.reward_pools import until

EPISODES = 10
SETTINGS = ("generation.sampling.max_new_tokens=48", "data.max_prompt_tokens=4000")
PAUSE = 40  # tokens before the engine pauses, of 400
ENDLESS = ("generation.sampling.max_new_tokens=400", "generation.sampling.min_new_tokens=400")
ARRAYS = ("tokens", "loss_mask", "logprobs", "versions")


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    return make_chain_model(tmp_path_factory.mktemp("chain_model"))


@pytest.fixture(scope="module")
def tokenizer(chain):
    return TextTokenizer(chain)


@pytest.fixture(scope="module")
def pauses():
    return PauseAfter()


@pytest.fixture(scope="module")
def server(chain, pauses):
    with chat_server(chain, pauses) as url:
        yield url


def drive(server, tokenizer, body, *settings):
    async def run():
        async with over_server(server, tokenizer, *SETTINGS, *settings) as episode:
            return await body(episode)

    return asyncio.run(run())


async def events_of(session, body, route="chat/completions"):
    """Yield the data of a stream's events, one after another."""
    async with httpx.AsyncClient(timeout=BOUND_S) as client:
        url = f"{session.base_url}/{route}"
        async with client.stream("POST", url, json=body | {"stream": True}) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])


async def chat(session, body, stream):
    """Return message and finish reason of a call."""
    if not stream:
        async with httpx.AsyncClient(timeout=BOUND_S) as client:
            (choice,) = (await client.post(f"{session.base_url}/chat/completions", json=body)).json()["choices"]
        message = {name: value for name, value in choice["message"].items() if value and name != "refusal"}
        return message, choice["finish_reason"]
    message, calls, end = Counter(), [], None
    async for event in events_of(session, body):
        assert "error" not in event
        (choice,) = event["choices"]
        delta = choice["delta"]
        calls += [{key: value for key, value in call.items() if key != "index"} for call in delta.pop("tool_calls", [])]
        for name, text in delta.items():
            message[name] = (message[name] or "") + text
        end = choice["finish_reason"] or end
    return {name: value for name, value in {**message, "tool_calls": calls}.items() if value}, end


async def played(episode, request, stream):
    """Play episodes of two turns. Return their messages with the reasons of their ends, and their rows."""
    results = []
    for number in range(EPISODES):
        session, messages, ends = episode.another(number), [USER], []
        for _ in range(2):
            message, end = await chat(session, request | {"messages": messages}, stream)
            messages, ends = [*messages, message, USER], [*ends, end]
        for call in (call for message in messages for call in message.get("tool_calls", [])):
            call["id"] = "differs between any two calls"
        rows = session.capture.rows()
        arrays = [[getattr(row, name).tolist() for name in ARRAYS] for row in rows]
        results.append((messages, ends, arrays, session.capture.metrics()))
        await session.close()
    return results


@pytest.mark.parametrize(
    ("request_body", "settings"),
    [
        ({}, ()),
        ({"tools": [TOOL]}, ()),
        ({"tools": [TOOL], "stop": ["im", " h", "5\n"]}, ()),
        ({"tools": [TOOL]}, ("rollout.gateway.reasoning_format=none",)),
        ({"tools": [TOOL], "stop": ["mh"]}, ("generation.sampling.new_tokens_per_chunk=5",)),
    ],
    ids=["plain", "tools", "stop", "no reasoning", "pieces"],
)
def test_stream_records_the_rows_of_a_plain_request(server, tokenizer, request_body, settings):
    """Tokens, log-probs, versions, messages and ends, with the same seeds."""

    async def body(episode):
        return [await played(episode, request_body, stream) for stream in (False, True)]

    plain, streamed = drive(server, tokenizer, body, *settings)
    assert streamed == plain
    messages = [message for played_messages, *_ in plain for message in played_messages[1::2]]
    assert len({message.get("content") for message in messages}) > 5
    if settings != ("rollout.gateway.reasoning_format=none",):
        assert sum("reasoning_content" in message for message in messages) > 3
    if "tools" in request_body and "stop" not in request_body:
        assert sum("tool_calls" in message for message in messages) > 1


@pytest.mark.parametrize(
    ("route", "mode"),
    [("chat/completions", "abort"), ("completions", "retract"), ("responses", "abort"), ("messages", "in_place")],
)
def test_text_comes_before_the_last_token(server, pauses, tokenizer, route, mode):
    """The engine pauses after some tokens, as for a weight update. The stream then goes on, without a gap."""
    texts = {
        "chat/completions": lambda event: event["choices"][0]["delta"].get("content", "") if event["choices"] else "",
        "completions": lambda event: event["choices"][0]["text"],
        "responses": lambda event: event.get("delta", "") if event["type"].endswith("text.delta") else "",
        "messages": lambda event: event.get("delta", {}).get("text", ""),
    }
    prompt = {"prompt": "1+1="} if route == "completions" else {"messages": [USER]}
    request = {"input": [USER]} if route == "responses" else prompt
    request |= {"max_completion_tokens": 400} if route == "chat/completions" else {"max_tokens": 400}

    async def body(episode):
        client, text, paused, pauses.steps = GenerationClient(timeout_s=BOUND_S), "", False, PAUSE
        async for event in events_of(episode.session, request, route):
            text += texts[route](event)
            if text and not paused:
                paused = True
                await until(lambda: not pauses.steps)
                await client.pause(server, mode)
                await client.resume(server)
        ((_, completion),) = episode.engine.returned
        assert paused and text == tokenizer.completion_text(completion.tokens.tolist())
        (row,) = episode.session.capture.rows()
        assert row.loss_tokens == len(completion.tokens) == 400
        await client.close()

    drive(server, tokenizer, body, *ENDLESS, "rollout.gateway.reasoning_format=none")


@pytest.mark.parametrize("route", ["chat/completions", "inference/v1/generate"])
def test_stream_without_text_to_show_sends_comments(server, pauses, tokenizer, monkeypatch, route):
    """A tool call is shown when it is complete, and /generate has one event; the connection is not silent meanwhile."""
    monkeypatch.setattr(routes, "KEEP_ALIVE_S", 0.01)
    request = {"messages": [USER], "stop": ["h", "5", "\n", " "]}  # not one of them ends the completion
    if route != "chat/completions":
        request = {"token_ids": tokenizer.encode_chat([USER])}

    async def body(episode):
        pauses.steps, lines, comment = PAUSE, [], routes.COMMENT.decode().strip()
        engine = GenerationClient(timeout_s=BOUND_S)
        async with httpx.AsyncClient(timeout=BOUND_S) as client:
            url = f"{episode.session.base_url}/{route}"
            async with client.stream("POST", url, json=request | {"stream": True}) as reply:
                async for line in reply.aiter_lines():
                    lines.append(line)
                    if line == comment and lines.count(comment) == 3:
                        await until(lambda: not pauses.steps)
                        await engine.resume(server)
        await engine.close()
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert len(episode.session.capture.rows()) == 1

    drive(server, tokenizer, body, *ENDLESS)


def test_stream_that_broke_is_continued_by_its_repeat(server, pauses, tokenizer, monkeypatch):
    """The repeat gets all of the same completion. Without one the call ends with the window, and trains nothing."""
    request = {"messages": [USER]}

    async def hang_up(session):
        pauses.steps = PAUSE
        async for event in events_of(session, request):
            if event["choices"][0]["delta"].get("content"):
                return

    async def resume():
        engine = GenerationClient(timeout_s=BOUND_S)
        await until(lambda: not pauses.steps)
        await engine.resume(server)
        await engine.close()

    async def body(episode):
        await hang_up(episode.session)
        await until(lambda: not episode.session.capture.waiting)
        assert episode.session.capture.rows() == []
        await resume()
        message, _ = await chat(episode.session, request, stream=True)
        ((_, completion),) = episode.engine.returned
        assert message["content"] == tokenizer.completion_text(completion.tokens.tolist())
        assert len(episode.session.capture.rows()) == len(episode.engine.calls) == 1

    async def without(episode):
        await hang_up(episode.session)
        await until(lambda: episode.calls.cut_tokens)
        assert episode.session.capture.rows() == [] and not episode.engine.returned
        pauses.steps = 0  # the call may have ended before them
        await resume()

    drive(server, tokenizer, body, *ENDLESS, "rollout.gateway.reasoning_format=none")
    monkeypatch.setattr(gateway, "RETRY_WINDOW_S", 0.01)
    drive(server, tokenizer, without, *ENDLESS, "rollout.gateway.reasoning_format=none")


def test_update_in_mid_stream_loses_and_repeats_no_token(server, pauses, chain, tokenizer, tmp_path):
    """The engine waits after some tokens, gets other weights, and goes on. Stream and row have both versions."""
    tensors = load_file(chain / "model.safetensors")
    sharper = {name: tensor * 1.25 if name == "lm_head.weight" else tensor for name, tensor in tensors.items()}
    versions = [publish(tmp_path, 1, chain, tensors=sharper), publish(tmp_path, 2, chain)]

    async def body(episode):
        client, text, updated, pauses.steps = GenerationClient(timeout_s=BOUND_S), "", False, PAUSE
        async for event in events_of(episode.session, {"messages": [USER]}):
            text += event["choices"][0]["delta"].get("content", "") if event["choices"] else ""
            if text and not updated:
                await until(lambda: not pauses.steps)
                updated = (await client.update_weights(server, str(versions[0]), 1, BOUND_S)).success
                await client.resume(server)
        ((_, completion),) = episode.engine.returned
        before = completion.versions.tolist().count(0)
        assert PAUSE - 1 <= before < 400 and completion.segments == [(0, before), (1, 400 - before)]
        assert text == tokenizer.completion_text(completion.tokens.tolist())
        (row,) = episode.session.capture.rows()
        assert row.tokens[row.loss_mask].tolist() == completion.tokens.tolist()
        assert row.versions.tolist() == completion.versions.tolist()
        assert (await client.update_weights(server, str(versions[1]), 2, BOUND_S)).success  # as the other tests have it
        await client.close()

    drive(server, tokenizer, body, *ENDLESS, "rollout.gateway.reasoning_format=none")


class Clock(selectors.DefaultSelector):
    """Time of an event loop: while it ``runs``, the loop never waits, but sets its clock to the next timer."""

    now, runs = 0.0, False

    def select(self, timeout=None):
        events = super().select(timeout if timeout is None or timeout <= 0 else 0 if self.runs else 0.01)
        if timeout and not events and self.runs:
            self.now += timeout
        return events

    def loop(self):
        loop = asyncio.SelectorEventLoop(self)
        loop.time = lambda: self.now
        return loop


@dataclasses.dataclass
class Slow(Scripted):
    """An engine that waits ``every_s`` before each of its tokens. ``sampled``: (time, token)."""

    clock: Clock | None = None
    every_s: float = 0.0
    sampled: list = dataclasses.field(default_factory=list)

    async def generate(self, call, deliver=lambda number, completion: None):
        self.clock.runs = True  # the request is here: nothing but time is left to wait for
        completion = self._completion(call)
        for token in completion.tokens.tolist():
            await asyncio.sleep(self.every_s)
            self.sampled.append((self.clock.now, token))
            call.on_tokens(0, [token])
        deliver(0, completion)
        return [completion]


@pytest.mark.parametrize("every_s", [0.75, 7.5])
def test_read_timeout_of_5_s_survives_a_completion_of_60_s(tokenizer, every_s):
    """OpenAI's client gets each token when it is sampled, and between them something at least every 5 s."""
    clock = Clock()
    text = "7" * (int(60 / every_s) - 1)
    engine, arrived = Slow(tokenizer, [text], clock=clock, every_s=every_s), []

    async def run():
        async with opened(engine, tokenizer, "generation.sampling.max_new_tokens=100") as episode:
            completions = episode.sdk(timeout=5.0).chat.completions
            async for chunk in await completions.create(model="m", messages=[USER], stream=True):
                arrived.extend((clock.now, "7") for _ in chunk.choices[0].delta.content or "")

    with asyncio.Runner(loop_factory=clock.loop) as runner:
        runner.run(run())
    assert [moment for moment, _ in arrived] == [moment for moment, _ in engine.sampled[: len(text)]]
    assert engine.sampled[-1][0] - engine.sampled[0][0] + every_s == pytest.approx(60)
