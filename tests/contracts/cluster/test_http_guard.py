"""The guard of every HTTP service: token, limits. Over real sockets if the transport matters."""

import asyncio
import contextlib
import json
import re
import resource
import socket
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from realsys.cluster import http_server
from realsys.cluster.http_client import CallFailed, HttpClient, authorization, signed_digest
from realsys.cluster.http_server import MAX_HEAD, Admission, Guard, HttpServer, RefusedRequest
from realsys.cluster.network import bind_tcp
from realsys.errors import GenerationError
from realsys.generation.client import GenerationClient
from realsys.generation.server import build_app as generation_app
from realsys.manager.routes import ManagerApp
from realsys.reward.reward_server import RewardServer

BOUND_S = 60.0
SHORT_S = 1.0  # bound on a request; a slow machine must have sent a whole one by then
LIMIT = 1000
SERVICES = ("manager", "generation_server", "reward_service")


def guarded(service, token):
    """The routes of a service; nothing is behind them."""
    if service == "manager":
        return ManagerApp(cast(Any, None), token, cast(Any, None)).build()
    if service == "reward_service":
        return RewardServer(cast(Any, None), 1, token=token).app
    return generation_app(cast(Any, None), token=token)


def call(guard, method, path, headers):
    """Status and body of one call over ASGI."""
    sent: list[Any] = []

    async def receive():
        return {"type": "http.request", "body": b"not json", "more_body": False}

    async def send(message):
        sent.append(message)

    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": raw}
    scope |= {"query_string": b"", "root_path": "", "scheme": "http", "server": ("x", 1), "http_version": "1.1"}
    asyncio.run(guard(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer secret ", "bearer secret", "secret", "Bearer \xff"])
def test_every_changing_call_needs_the_token(service, given):
    guard = guarded(service, "secret")
    headers = {} if given is None else {"authorization": given}
    routes = [(m, r.path) for r in cast(Any, guard)._app.routes for m in r.methods - {"GET", "HEAD"}]
    assert len(routes) >= (1 if service == "reward_service" else 5)
    secret = [("GET", path) for path in cast(Any, guard)._secret]
    for method, path in [*routes, *secret, ("PUT", "/unknown"), ("DELETE", "/status")]:
        status, body = call(guard, method, path, headers)
        assert status == 401 and "needs the trial's token" in json.dumps(body), (method, path)
    assert guard.refused["token"] == len(routes) + len(secret) + 2


@pytest.mark.parametrize("service", SERVICES)
def test_with_the_token_a_call_reaches_its_route(service):
    guard = guarded(service, "secret")
    for route in cast(Any, guard)._app.routes:
        for method in route.methods - {"GET", "HEAD"}:
            status, _ = call(guard, method, route.path, {"authorization": "Bearer secret"})
            assert status == 400, route.path  # the body is no JSON
    assert not guard.refused


async def echo(request):
    return PlainTextResponse(str(len(await request.body())))


@pytest.fixture
def served():
    app = Starlette(routes=[Route("/echo", echo, methods=["POST"])])
    guard = Guard(app, Admission("secret"), max_body=LIMIT, error=lambda message: {"error": message})
    http = HttpServer(guard)
    http.start()
    yield guard, http.url
    http.close()


def talk(url, *pieces):
    """Return the bytes that arrive until the other side closes."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=BOUND_S) as connection:
        answer = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
            while part := connection.recv(65536):
                answer += part
        except (ConnectionResetError, BrokenPipeError):
            pass
        return answer


def head(length, *more):
    lines = ["POST /echo HTTP/1.1", "Host: x", "Connection: close", "Authorization: Bearer secret", *more]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def test_body_up_to_the_limit_is_served(served):
    assert talk(served[1], head(LIMIT), bytes(LIMIT)).endswith(b"\r\n\r\n1000")
    assert not served[0].refused


def test_declared_size_over_the_limit_is_refused(served):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for length in (LIMIT + 1, 1 << 40, (1 << 63) - 1):
        assert talk(served[1], head(length)).startswith(b"HTTP/1.1 413")
    assert served[0].refused["size"] == 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100 << 10  # KiB


def test_chunked_body_over_the_limit_is_refused(served):
    chunk = b"1f4\r\n" + bytes(500) + b"\r\n"
    begin = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    assert talk(served[1], begin, *[chunk] * 3, b"0\r\n\r\n").startswith(b"HTTP/1.1 413")


def test_head_without_end_is_cut_off(served):
    """Before our code sees it; h11 has such a limit, httptools has none."""
    lines = [f"X-{n}: ".encode() + b"y" * 8000 + b"\r\n" for n in range(200)]
    answer = talk(served[1], b"POST /echo HTTP/1.1\r\nHost: x\r\n", *lines)
    assert b"400" in answer[:20] or answer == b""
    assert sum(map(len, lines)) > 10 * MAX_HEAD


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\r\n",
        b"POST /echo HTTP/1.1\r\nHost: x\r\n",
        head(10) + bytes(9),
        head(10).replace(b"secret", b"wrong") + bytes(9),
    ],
)
def test_request_that_never_ends_is_closed(served, monkeypatch, sent):
    """Callers without a token must not keep connections open."""
    monkeypatch.setattr(http_server, "REQUEST_S", 0.2)
    talk(served[1], sent)  # returns when the other side closes


def test_flood_of_half_requests_leaves_room_for_others(served, monkeypatch, caplog):
    """Callers without a token must not take the descriptors with which a process renews its lease."""
    monkeypatch.setattr(http_server, "most_connections", lambda: 10)
    where = urlsplit(served[1])
    with contextlib.ExitStack() as stack:
        flood = []
        for _ in range(30):
            flood.append(stack.enter_context(socket.create_connection((where.hostname, where.port), timeout=BOUND_S)))
            flood[-1].sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\n")
        assert talk(served[1], head(10) + bytes(10)).endswith(b"10")
        assert all(connection.recv(1) == b"" for connection in flood[:20]), "the longest wait ends first"
    assert caplog.text.count("over 10 connections") == 1


def test_connection_whose_next_request_never_begins_is_closed(served, monkeypatch):
    """An empty line ends uvicorn's wait for the next request, and begins none."""
    monkeypatch.setattr(http_server, "REQUEST_S", SHORT_S)
    where = urlsplit(served[1])
    with socket.create_connection((where.hostname, where.port), timeout=BOUND_S) as connection:
        connection.sendall(head(10).replace(b"Connection: close\r\n", b"") + bytes(10))
        answer = b""
        while not answer.endswith(b"\r\n\r\n10"):
            part = connection.recv(65536)
            assert part, answer
            answer += part
        connection.sendall(b"\r\n")
        assert connection.recv(65536) == b""


def test_answer_may_take_longer_than_a_request(monkeypatch):
    monkeypatch.setattr(http_server, "REQUEST_S", SHORT_S)

    async def think(request):
        await asyncio.sleep(1.5 * SHORT_S)
        return PlainTextResponse("done")

    app = Starlette(routes=[Route("/echo", think, methods=["POST"])])
    http = HttpServer(Guard(app, Admission(None), max_body=LIMIT, error=str))
    http.start()
    try:
        assert talk(http.url, head(10) + bytes(10)).endswith(b"done")
    finally:
        http.close()


def test_full_service_refuses_before_the_body():
    """Else it would hold the bodies of all callers that it refuses."""

    @contextlib.contextmanager
    def room(size):
        sizes.append(size)
        if size > 500:
            raise RefusedRequest(503, "it is full", retry_after_s=4)
        yield
        sizes.append(-size)

    sizes: list[int] = []
    app = Starlette(routes=[Route("/echo", echo, methods=["POST"])])
    http = HttpServer(Guard(app, Admission("secret"), max_body=LIMIT, error=str, room=room))
    http.start()
    try:
        refused = talk(http.url, head(LIMIT))
        assert refused.startswith(b"HTTP/1.1 503") and b"retry-after: 4" in refused
        assert talk(http.url, head(500), bytes(500)).endswith(b"500")
        assert sizes == [1000, 500, -500]
    finally:
        http.close()


def test_get_has_no_body(served):
    """It needs no token, so any caller could make the service hold as many bytes as a call may have."""
    get = head(1).replace(b"POST", b"GET")
    assert talk(served[1], get + b"x").startswith(b"HTTP/1.1 413")
    assert talk(served[1], get.replace(b"Content-Length: 1", b"X: y")).startswith(b"HTTP/1.1 405")


def test_two_requests_on_one_connection_are_told_apart(served):
    """A body before the head that follows it does not count as head."""
    first = head(900).replace(b"Connection: close\r\n", b"")
    answer = talk(served[1], first + bytes(900) + head(10) + bytes(10))
    assert answer.count(b"HTTP/1.1 200") == 2


def test_generation_client_proves_that_it_knows_the_token(served):
    async def run(token):
        client = GenerationClient(BOUND_S, token=token)
        try:
            await client.resume(served[1])
        except GenerationError as error:
            return str(error)
        finally:
            await client.close()
        return ""

    assert "status 404" in asyncio.run(run("secret"))  # past the guard: there is no such route here
    assert "status 401" in asyncio.run(run(None))
    assert "status 401" in asyncio.run(run("another"))


def caught(url, body, query=""):
    """What a client of the trial sends to a stranger, who listens in place of the service at ``url``."""

    async def run():
        request: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def stranger(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(re.findall(rb"Content-Length: (\d+)", head)[0])
            request.set_result(head + await reader.readexactly(size))
            writer.close()

        place = urlsplit(url)
        async with await asyncio.start_server(stranger, place.hostname, place.port):
            async with HttpClient("secret") as client:
                with pytest.raises(CallFailed):
                    await client.call(f"{url}/echo{query}", body, BOUND_S)
            return await asyncio.wait_for(request, BOUND_S)

    return asyncio.run(run())


@pytest.fixture
def request_at_old_port():
    """A request that a stranger has caught, and the address of the service that listens there now."""
    with contextlib.closing(bind_tcp("127.0.0.1")) as held:
        port = held.getsockname()[1]
    request = caught(f"http://127.0.0.1:{port}", {"a": 1}, "?b=%20c")
    app = Starlette(routes=[Route("/echo", lambda request: PlainTextResponse("done"), methods=["POST"])])
    server = HttpServer(Guard(app, Admission("secret"), max_body=LIMIT, error=str), "127.0.0.1", port)
    server.start()
    yield request.replace(b"Host", b"Connection: close\r\nHost", 1), server.url
    server.close()


def test_stranger_at_an_old_address_does_not_learn_the_token(request_at_old_port):
    """What it catches is an order to this address only, as it is."""
    request, url = request_at_old_port
    assert b"secret" not in request
    assert talk(url, request).startswith(b"HTTP/1.1 200")
    for old, new in ((b'{"a":1}', b'{"a":2}'), (b"/echo", b"/stop"), (b"%20c", b"d"), (b"POST", b"PUT")):
        assert old in request
        assert talk(url, request.replace(old, new, 1)).startswith(b"HTTP/1.1 401"), new


def test_request_that_was_passed_on_is_refused(request_at_old_port, served):
    assert talk(served[1], request_at_old_port[0]).startswith(b"HTTP/1.1 401")
    assert served[0].refused["token"] == 1


@pytest.mark.parametrize(
    ("host", "server", "is_own"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("localhost", "::1", True),
        ("[fd00::7]", "fd00:0::7", True),
        ("10.0.0.7", "::ffff:10.0.0.7", True),  # the service is bound to ::
        ("10.0.0.8", "10.0.0.7", False),
        ("127.0.0.1", "10.0.0.7", False),
        ("node7", "10.0.0.7", False),
    ],
)
def test_signature_holds_at_one_address(host, server, is_own):
    scope = {"method": "GET", "raw_path": b"/copy", "query_string": b"", "server": (server, 8000)}
    place = f"{host}:8000"
    given = authorization("secret", "GET", f"http://{place}/copy").encode()
    assert bool(signed_digest("secret", scope, place.encode(), given)) is is_own
    assert not signed_digest("another", scope, place.encode(), given)
    scope["server"] = (server, 8001)
    assert not signed_digest("secret", scope, place.encode(), given)
