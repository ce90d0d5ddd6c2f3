"""No request of an agent takes the gateway for itself, and none keeps other agents from their replies."""

from __future__ import annotations

import asyncio
import gc
import json
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from realsys.cluster.lease import Heartbeat, LeaseTerms
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import Fenced
from realsys.rollout.gateway import request_fields, routes
from realsys.rollout.gateway.capture import Capture
from tests.support.gateway.garbage import BURST, CALL, KINDS, SLOW, misbehave
from tests.support.ledger.memory_store import MemoryNameStore
from tests.support.serving.gateways import BOUND_S, Opened, Scripted, opened, post

ROW = (
    "data.max_prompt_tokens=4000",
    "generation.sampling.max_new_tokens=96",
    "generation.embedded.context_length=4096",
)
OTHERS, CALLS, ACTS = 10, 5, 5
REQUESTS = {"slow": SLOW, "burst": BURST}  # of one act of an agent; else one


@dataclass
class Served:
    """Episodes of a gateway in a thread of its own, whose CPU time is that of their requests."""

    urls: list[str]
    clock: int

    def cpu_s(self) -> float:
        return time.clock_gettime(self.clock)


@contextmanager
def serving(tokenizer: TextTokenizer) -> Iterator[Served]:
    loop, stop, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with opened(Scripted(tokenizer), tokenizer, *ROW) as episode:
            others = [episode.another(k) for k in range(1, OTHERS + 1)]
            urls.extend(session.base_url for session in (episode.session, *others))
            ready.set()
            await stop.wait()
            for session in others:
                await session.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    gc.freeze()  # a full collection of what other tests left would be charged to whoever is served
    thread.start()
    try:
        assert ready.wait(BOUND_S)
        assert thread.ident is not None
        yield Served(urls, time.pthread_getcpuclockid(thread.ident))
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
        gc.unfreeze()


async def others(urls: list[str]) -> list[int]:
    """Return the statuses of the calls of agents that behave."""

    async def one(url: str) -> list[int]:
        async with httpx.AsyncClient(timeout=BOUND_S) as client:
            return [(await client.post(f"{url}/chat/completions", json=CALL)).status_code for _ in range(CALLS)]

    return [status for each in await asyncio.gather(*map(one, urls)) for status in each]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("ordinary", "longest")])
def test_garbage_costs_about_as_much_as_a_good_call(tokenizer: TextTokenizer, kind: str) -> None:
    """A megabyte of JSON takes ten times as long to read as a prompt of 4,000 characters; more is not read.

    Each is done several times, in turn, and its least counts: what else the machine does only adds to a cost.
    """
    with serving(tokenizer) as served:

        def cost(kind: str) -> float:
            before = served.cpu_s()
            asyncio.run(misbehave(KINDS[kind], served.urls[0], 1))
            return (served.cpu_s() - before) / REQUESTS.get(kind, 1)

        # Refused requests are answered one after the other, so an act of many takes seconds.
        acts = 2 if kind == "burst" else ACTS
        costs = [(cost("longest"), cost(kind)) for _ in range(acts)]
        good, garbage = map(min, zip(*costs, strict=True))
        print(f"{kind}: {1e3 * garbage:.2f} ms, the longest good call {1e3 * good:.2f} ms")
        assert garbage < 20 * good


def test_messages_beyond_a_row_are_refused_unread(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding 20,000 messages would keep all others waiting."""
    decoded: list[int] = []
    decode = request_fields._decode

    def noting(body: bytes) -> Any:
        decoded.append(len(body))
        return decode(body)

    monkeypatch.setattr(request_fields, "_decode", noting)

    async def refused() -> None:
        async with opened(Scripted(tokenizer), tokenizer) as episode:
            for route in ("chat/completions", "messages", "tokenize"):
                reply = await post(episode, route, CALL | {"messages": CALL["messages"] * 20_000})
                assert reply.status_code == 400 and "20000 messages" in reply.text
            said = [{"role": "user", "content": '{"role":' * 30}]  # a text has no message, whatever it says
            assert (await post(episode, "chat/completions", CALL | {"messages": said})).status_code == 200

    asyncio.run(refused())
    assert max(decoded) < 1000


def test_burst_of_an_episode_is_read_in_turn(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that arrive together one is read in each round of the event loop, so others come between them."""
    rounds, reads = [0], list[int]()
    begin = Capture.begin

    def noting(self: Capture, *request: Any) -> Any:
        reads.append(rounds[0])
        return begin(self, *request)

    monkeypatch.setattr(Capture, "begin", noting)

    async def count_rounds() -> None:
        while True:
            rounds[0] += 1
            await asyncio.sleep(0)

    async def burst() -> None:
        async with opened(Scripted(tokenizer), tokenizer) as episode:
            counting = asyncio.create_task(count_rounds())
            await asyncio.gather(*(in_process(episode) for _ in range(20)))
            counting.cancel()

    asyncio.run(burst())
    assert len(reads) == len(set(reads)) == 20


def test_refused_request_waits_and_nobody_else_does(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that repeats it at once, on many connections, would take the time of others."""
    monkeypatch.setattr(routes, "REFUSED_S", 100 * BOUND_S)

    async def body() -> None:
        async with opened(Scripted(tokenizer), tokenizer) as episode:
            other = episode.another(1)
            refused = asyncio.create_task(post(episode, "chat/completions", {**CALL, "max_tokens": "many"}))
            async with httpx.AsyncClient(timeout=BOUND_S) as client:
                assert (await client.post(f"{other.base_url}/chat/completions", json=CALL)).status_code == 200
            answered, _ = await asyncio.wait([refused], timeout=0.2)
            assert not answered
            refused.cancel()
            await asyncio.gather(refused, return_exceptions=True)
            await other.close()

    asyncio.run(asyncio.wait_for(body(), BOUND_S))


async def in_process(episode: Opened) -> None:
    """Make a call without a socket: it arrives in the same round of the event loop as its like."""
    body, sent = [json.dumps(CALL).encode()], asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not body:
            await sent.wait()
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body.pop()}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.set()

    path = urlsplit(f"{episode.session.base_url}/chat/completions").path
    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    await episode.gateway._routes(scope, receive, send)


def test_others_are_served_beside_garbage(tokenizer: TextTokenizer) -> None:
    """Nor does a thread of the process miss its lease: tokenising a long text may not keep the interpreter's lock."""
    store, losses = MemoryNameStore(), queue.SimpleQueue[Fenced]()
    beating = Heartbeat(store, "t/heartbeat/rollout_worker/0", "rollout_worker", 0, LeaseTerms(20, 0.5), losses.put)

    async def both(served: Served) -> list[int]:
        acts = [asyncio.create_task(misbehave(each, served.urls[0])) for each in KINDS.values()]
        try:
            return await others(served.urls[1:])
        finally:
            for act in acts:
                act.cancel()
            await asyncio.gather(*acts, return_exceptions=True)

    with serving(tokenizer) as served:
        beating.start()
        assert asyncio.run(both(served)) == [200] * OTHERS * CALLS
        beating.stop()
    store.close()
    assert losses.empty()
