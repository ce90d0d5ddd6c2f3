"""The manager's client against real HTTP servers that come and go."""

import asyncio

import msgspec
import pytest
from aiohttp import web

from realsys.cluster.http_client import authorization
from realsys.errors import GenerationError, NameStoreError, StreamError, WaitTimeout
from realsys.manager import client
from realsys.manager.client import ManagerClient, RolloutSuperseded
from realsys.manager.messages import AllocateReply, AllocateRequest, FinishReply, FinishRequest, ScheduleRequest
from realsys.types import Ticket


class Server:
    """Answers each POST with the next (status, body) of ``script``; the last one for ever."""

    def __init__(self, *script):
        self.script, self.requests = list(script), []

    async def start(self):
        app = web.Application()
        app.router.add_post("/{path}", self._handle)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        host, port = self.runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def _handle(self, request):
        self.requests.append((request.path, request.headers.get("Authorization"), await request.read()))
        status, body = self.script[0] if len(self.script) == 1 else self.script.pop(0)
        return web.Response(status=status, body=body if isinstance(body, bytes) else msgspec.json.encode(body))

    async def stop(self):
        await self.runner.cleanup()


def with_client(body, resolve, **options):
    async def run():
        client = ManagerClient(resolve, "secret", **options)
        try:
            async with asyncio.timeout(60):
                await body(client)
        finally:
            await client.close()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(client, "FIRST_DELAY_S", 0.005)
    monkeypatch.setattr(client, "LAST_DELAY_S", 0.02)


ADDRESS = {}
SCHEDULE = ScheduleRequest("7", 0, prompt_len=3, max_new_tokens=5)
NO_SERVER = (503, {"error": "no routable server at version 3"})


def resolve():
    if "url" not in ADDRESS:
        raise NameStoreError("key gserver_manager is not there")
    return ADDRESS["url"]


def test_call_carries_signature_and_typed_body():
    async def body(client):
        server = await Server((200, AllocateReply([Ticket("7", 1, 5, n=4)]))).start()
        ADDRESS["url"] = server.url
        reply = await client.allocate(AllocateRequest("rollout_worker/0", 3, 0.0))
        assert reply.tickets == [Ticket("7", 1, 5, n=4)]
        ((path, signature, sent),) = server.requests
        assert path == "/allocate_rollout"
        assert signature == authorization("secret", "POST", server.url + path, sent)
        assert msgspec.json.decode(sent, type=AllocateRequest).max_tickets == 3
        await server.stop()

    with_client(body, resolve)


def test_manager_at_new_address_is_found():
    async def body(client):
        first = await Server((200, FinishReply(True))).start()
        ADDRESS["url"] = first.url
        request = FinishRequest("7", 0, "rollout_worker/0", "accepted")
        await client.finish(request)
        await first.stop()
        call = asyncio.create_task(client.finish(request))
        second = await Server((503, b"starting"), (500, {"error": "journal"}), (200, FinishReply(False))).start()
        ADDRESS["url"] = second.url
        assert (await call).known is False
        assert len(second.requests) == 3
        await second.stop()

    with_client(body, resolve)


def test_missing_manager_is_named_after_bounded_wait():
    async def body(client):
        ADDRESS.pop("url", None)
        with pytest.raises(WaitTimeout, match=r"waited 0.1 s for the gserver_manager .*gserver_manager is not there"):
            await client.allocate(AllocateRequest("w", 1))

    with_client(body, resolve, retry_timeout_s=0.1)


FINISHING = ("finish", FinishRequest("7", 0, "rollout_worker/0", "accepted"))
SCHEDULING = ("schedule", SCHEDULE)


@pytest.mark.parametrize(
    ("answer", "call", "limit", "error", "text"),
    [
        ((503, b"closing"), FINISHING, "retry_timeout_s", WaitTimeout, "/finish_rollout: status 503: closing"),
        (NO_SERVER, SCHEDULING, "no_server_retry_timeout_s", GenerationError, "waited 0.1 s .*server at version 3"),
    ],
)
def test_wait_for_a_better_answer_is_bounded(answer, call, limit, error, text):
    """A manager that is not there yet differs from servers that are not there."""

    async def body(client):
        server = await Server(answer).start()
        ADDRESS["url"] = server.url
        with pytest.raises(error, match=text):
            await getattr(client, call[0])(call[1])
        await server.stop()

    with_client(body, resolve, **{limit: 0.1})


def test_scheduling_waits_for_a_server():
    async def body(client):
        server = await Server(NO_SERVER, NO_SERVER, (200, {"server": "s/0", "url": "http://s", "version": 3})).start()
        ADDRESS["url"] = server.url
        assert (await client.schedule(SCHEDULE)).server == "s/0"
        await server.stop()

    with_client(body, resolve)


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        ((409, {"error": "attempt 0 is not running"}), RolloutSuperseded, "attempt 0 is not running"),
        ((401, {"error": "needs the token"}), StreamError, "status 401: needs the token"),
        ((400, b"\xff not json"), StreamError, "status 400: . not json"),
        ((200, b"[]"), StreamError, "reply cannot be read"),
    ],
)
def test_a_refusal_is_final(answer, error, text):
    async def body(client):
        server = await Server(answer).start()
        ADDRESS["url"] = server.url
        with pytest.raises(error, match=text):
            await client.schedule(SCHEDULE)
        assert len(server.requests) == 1
        await server.stop()

    with_client(body, resolve)
