"""HTTP of the training service: keys and sizes are checked before a body is read."""

import asyncio

import msgspec
import pytest

from realsys.serve import routes
from realsys.serve.settings import Owner
from tests.support.needs import need_package
from tests.support.serve.tinker_calls import SETTINGS, serving


@pytest.fixture(autouse=True)
def tinker():
    need_package("tinker")


async def post(app, path, body, key=b"tml-a", length=None):
    """Return the status and the decoded reply. ``length``: what the request declares; its body is then not read."""
    headers = [(b"x-api-key", key), (b"content-length", str(length or len(body)).encode())]
    scope = {
        "type": "http", "method": "POST", "path": f"/api/v1/{path}", "query_string": b"", "headers": headers,
        "http_version": "1.1", "scheme": "http", "root_path": "", "server": ("h", 1),
    }  # fmt: skip
    sent = []

    async def receive():
        assert length is None, "the body was read"
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    reply = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], msgspec.json.decode(reply) if reply else None


def test_bodies_of_an_owner_are_bounded_together(tmp_path, monkeypatch):
    """Those of another owner arrive."""
    settings = msgspec.structs.replace(SETTINGS, owners=(Owner("tml-a", name="a"), Owner("tml-b", name="b")))
    monkeypatch.setattr("realsys.serve.service._OWNER_BYTES", 1000)

    async def scenario():
        async with serving(tmp_path, settings) as service:
            app, owner = routes.app(service), service.owner("tml-a")
            with service.body(owner, 900):
                got, reply = await post(app, "create_session", b"{}", length=200)
                assert got == 429 and "900 bytes of requests" in reply["detail"]
                assert (await post(app, "create_session", b"{}"))[0] == 200
                assert (await post(app, "create_session", b"{}" + b" " * 200, key=b"tml-b"))[0] == 200
            assert (await post(app, "create_session", b"{}" + b" " * 2000))[0] == 200, "one alone may be larger"

    asyncio.run(scenario())


def test_refusals_have_their_status(tmp_path):
    settings = msgspec.structs.replace(SETTINGS, owners=(Owner("tml-a", name="a"),))

    async def scenario():
        async with serving(tmp_path, settings) as service:
            app = routes.app(service)
            for path, body, given, status, why in (
                ("create_session", b"{}", {"key": b"tml-b", "length": 100}, 401, "X-API-Key"),
                ("create_session", b"{}", {"length": routes.MAX_BODY + 1}, 413, "over the limit"),
                ("optim_step", b"{", {}, 400, "the body of optim_step"),
                ("optim_step", b'{"model_id": "m", "seq_id": 1}', {}, 404, "model m not found"),
                ("forward_backward", b"\xff", {}, 400, "ForwardBackwardRequest"),
                ("session_heartbeat", b'{"session_id": "s"}', {}, 404, "session s not found"),
                ("retrieve_future", b'{"request_id": "s:sample:0:1"}', {}, 404, "session s not found"),
            ):
                got, reply = await post(app, path, body, **given)
                assert got == status and why in reply["detail"], path
            status, reply = await post(app, "create_session", b"{}")
            assert status == 200
            session = reply["session_id"]
            body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
            status, future = await post(app, "create_model", msgspec.json.encode(body))
            assert status == 200
            assert await post(app, "create_model", msgspec.json.encode(body)) == (200, future)
            status, reply = await post(app, "retrieve_future", msgspec.json.encode(future))
            assert (status, reply) == (200, {"type": "create_model", "model_id": f"{session}:train:0"})
            far = msgspec.json.encode({"model_id": reply["model_id"], "seq_id": 10**30})
            assert (await post(app, "optim_step", far))[0] == 400

    asyncio.run(scenario())
