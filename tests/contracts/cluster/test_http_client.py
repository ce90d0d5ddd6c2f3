"""Clients of the trial's HTTP services against servers that say too much."""

import asyncio
import gzip
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from realsys.cluster import http_client
from realsys.cluster.http_client import CallFailed, HttpClient
from realsys.cluster.http_server import HttpServer
from realsys.cluster.network import advertised_host
from realsys.errors import GenerationError, ServerSilent, WaitTimeout
from realsys.generation.client import GenerationClient, SamplingSpec
from realsys.generation.sglang.api import SglangApi
from realsys.manager.client import ManagerClient
from tests.support.processes.ports import lasting_ports

BOUND_S = 30.0
LIMIT = 1000


async def declared(request):
    return web.Response(body=b" " * (LIMIT + 1))


async def endless(request):
    response = web.StreamResponse()
    await response.prepare(request)
    try:
        while True:
            await response.write(b" " * LIMIT)
    except ConnectionResetError:
        return response


async def packed(request):
    """Small on the wire, larger in memory."""
    assert request.headers["Accept-Encoding"] == "identity"
    return web.Response(body=gzip.compress(b" " * (LIMIT + 1)), headers={"Content-Encoding": "gzip"})


def with_server(answer, use):
    async def run():
        app = web.Application()
        app.add_routes([web.route("*", "/{path:.*}", answer)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            async with asyncio.timeout(BOUND_S):
                await use(f"http://{host}:{port}")
        finally:
            await runner.cleanup()

    asyncio.run(run())


async def ask_server(url):
    client = GenerationClient(BOUND_S)
    try:
        await client.model_info(url)
    finally:
        await client.close()


async def ask_sglang(url):
    async with http_client.HttpClient() as http:
        await SglangApi(http, url).pause("abort")
        await SglangApi(http, url).loads(BOUND_S)


async def ask_manager(url):
    client = ManagerClient(lambda: url, "token", retry_timeout_s=0.0)
    try:
        await client.status()
    finally:
        await client.close()


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(http_client, "MAX_REPLY", LIMIT)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("answer", [declared, endless])
@pytest.mark.parametrize(
    ("ask", "error"), [(ask_server, GenerationError), (ask_sglang, GenerationError), (ask_manager, WaitTimeout)]
)
def test_reply_over_the_limit_is_an_error(answer, ask, error):
    with pytest.raises(error, match="the reply is over the limit of 1000 bytes") as caught:
        with_server(answer, ask)
    assert getattr(caught.value, "retryable", True)


def test_client_may_have_a_lower_limit():
    async def ask(url):
        async with http_client.HttpClient(max_reply=LIMIT) as http:
            await http.call(url, None, BOUND_S)

    with pytest.raises(http_client.CallFailed, match="the reply is over the limit of 1000 bytes"):
        with_server(declared, ask)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), ("1.5", 1.5), ("Wed, 21 Oct 2015 07:28:10 GMT", 10.0), ("soon", 0.0), ("-3", 0.0), ("", 0.0)],
)
def test_service_says_when_to_call_again(header, seconds):
    assert http_client.retry_after_s({"Retry-After": header}, now=1445412480.0) == seconds


@pytest.mark.usefixtures("small")
def test_reply_is_not_unpacked():
    with pytest.raises(GenerationError, match="reply cannot be read"):
        with_server(packed, ask_server)


def test_generation_client_has_limits_of_configuration():
    asked: list[Any] = []

    async def silent(request):
        asked.append(await request.json())
        await asyncio.Event().wait()
        raise AssertionError

    async def ask(url):
        client = GenerationClient(1.0, progress_s=0.02)
        try:
            await client.generate(url, [1], SamplingSpec(), rid="a", seed=1)
        finally:
            await client.close()

    with pytest.raises(ServerSilent, match="no answer and no progress within 1 s"):
        with_server(silent, ask)
    assert [body["progress_s"] for body in asked] == [0.02]


@contextmanager
def serving(host):
    async def hello(request):
        return PlainTextResponse("hello")

    server = HttpServer(Starlette(routes=[Route("/", hello)]), host)
    server.start()
    try:
        yield server
    finally:
        server.close()


@pytest.mark.parametrize(("host", "advertised"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("0.0.0.0", "")])
def test_server_advertises_a_reachable_address(host, advertised):
    with serving(host) as server:
        assert server.url.removeprefix("http://").rpartition(":")[0] == (advertised or advertised_host(host))


def test_server_serves_on_the_loop_of_its_caller():
    async def hello(request):
        return PlainTextResponse("hello")

    async def body():
        server = HttpServer(Starlette(routes=[Route("/", hello)]))
        ready = asyncio.Event()
        serving = asyncio.create_task(server.serve(ready.set))
        async with asyncio.timeout(BOUND_S), http_client.HttpClient() as http:
            await ready.wait()
            assert await http.call(server.url, None, BOUND_S) == b"hello"
            with pytest.raises(http_client.CallFailed, match="^status 404: Not Found$") as missing:
                await http.call(f"{server.url}/nowhere", {"some": "body"}, BOUND_S)
            assert missing.value.status == 404
            server.stop()
            await serving
            with pytest.raises(http_client.CallFailed, match="^connection failed: ") as refused:
                await http.call(server.url, None, BOUND_S)
            assert refused.value.status == 0 and not await http.answers(server.url, BOUND_S)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b'{"error": {"message": "queue\\nfull"}}', "queue full"),
        (b'{"error": "stale"}', "stale"),
        (b'{"message": "bad rid"}', "bad rid"),
        (b"plain text", "plain text"),
        (b'{"error": 3}', "no reason given"),
        (b"[]", "no reason given"),
        (b"", "no reason given"),
    ],
)
def test_reason_of_an_error_reply(payload, reason):
    assert http_client.reason_of(payload) == reason


def test_failed_call_says_what_is_known():
    """A refusal for load, a service that is not there, and a broken connection ask for different reactions."""

    async def full(request):
        return web.json_response({"error": "full"}, status=503, headers={"Retry-After": "7"})

    async def failed(url):
        async with HttpClient() as client:
            with pytest.raises(CallFailed) as caught:
                await client.call(url, {}, BOUND_S)
        return caught.value

    async def ask(url):
        refused = await failed(url)
        assert (refused.status, refused.retry_after_s, refused.unreachable) == (503, 7.0, False)

    with_server(full, ask)
    gone = asyncio.run(failed(f"http://127.0.0.1:{lasting_ports(1)[0]}"))
    assert (gone.status, gone.retry_after_s, gone.unreachable, gone.timed_out) == (0, 0.0, True, False)


def test_large_request_arrives_whole():
    async def count(request):
        return web.Response(text=str(len(await request.text())))

    async def ask(url):
        async with HttpClient() as client:
            assert await client.call(url, "x" * ((1 << 20) - 2), BOUND_S) == b"1048576"

    with_server(count, ask)


def test_attempts_end_with_their_limit(monkeypatch):
    """The sleeps between them double up to the last delay. On a clock that only the sleeps advance."""
    now, slept = [0.0], list[float]()

    async def sleep(delay_s):
        slept.append(delay_s)
        now[0] += delay_s

    clock = SimpleNamespace(time=lambda: now[0])
    monkeypatch.setattr(http_client, "asyncio", SimpleNamespace(sleep=sleep, get_running_loop=lambda: clock))

    async def numbers(limit_s):
        return [number async for number in http_client.attempts(limit_s, 0.5, 2.0)]

    assert asyncio.run(numbers(0.0)) == [0] and not slept
    assert asyncio.run(numbers(6.0)) == [0, 1, 2, 3, 4, 5] and slept == [0.5, 1.0, 2.0, 2.0, 0.5]
