"""HTTP of the training service: the routes of the Tinker protocol that its SDK calls, under /api/v1/.

The key of a request (X-API-Key) is checked before its body is read. A reply with an error has the field ``detail``.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from realsys.cluster.aio import run_beside
from realsys.cluster.http_server import Admission, Guard, HttpServer, RefusedRequest, declared
from realsys.cluster.lease import CheckAlive, unleased
from realsys.cluster.network import is_loopback
from realsys.errors import MALFORMED, ConfigError
from realsys.serve import wire
from realsys.serve.service import Service
from realsys.serve.settings import Owner

MAX_BODY = 64 << 20  # bytes, also of a body that was compressed; the SDK's chunks have 5 MB or less
_INLINE = 64 << 10  # bytes of a body that is parsed on the event loop
T = TypeVar("T")
Endpoint = Callable[[Owner, Request], Awaitable[object]]


async def serve(
    service: Service,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    on_ready: Callable[[str], None] = lambda url: None,
    check_alive: CheckAlive = unleased,
) -> None:
    """Serve and carry out calls until one fails, or ``service.stop``. ``on_ready`` is called with the URL.

    Raises ConfigError for a host beyond loopback without keys.
    """
    if not service.settings.owners and not is_loopback(host):
        raise ConfigError("cluster.host", host, "a service without keys must be on loopback: give it keys")
    server = HttpServer(app(service, check_alive), host, port)

    async def run() -> None:
        try:
            await service.run()
        finally:
            server.stop()

    await run_beside(server.serve(lambda: on_ready(server.url)), run())


def app(service: Service, check_alive: CheckAlive = unleased) -> ASGIApp:
    """Return the ASGI application."""

    def route(path: str, endpoint: Endpoint, method: str = "POST") -> Route:
        async def answer(request: Request) -> Response:
            try:
                reply = await endpoint(request.scope["realsys.owner"], request)
            except RefusedRequest as refused:
                return _error(refused)
            except MALFORMED as error:
                return _error(RefusedRequest(400, f"the body of {path}: {error}"))
            return reply if isinstance(reply, Response) else _json(reply)

        return Route("/api/v1/" + path, answer, methods=[method])

    routes = Starlette(routes=[route(*row) for row in _table(service)])
    guarded = Guard(routes, Admission(None, (), check_alive), max_body=MAX_BODY, error=lambda why: {"detail": why})

    async def with_key(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        key = next((value for name, value in scope["headers"] if name == b"x-api-key"), b"")
        try:
            scope["realsys.owner"] = owner = service.owner(key.decode("latin-1"))
            with service.body(owner, declared(scope)):
                await guarded(scope, receive, send)
        except RefusedRequest as refused:
            await _error(refused)(scope, receive, send)

    return with_key


def _json(reply: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(reply), status, headers, "application/json")


def _error(refused: RefusedRequest) -> Response:
    headers = {"retry-after": str(refused.retry_after_s)} if refused.retry_after_s else None
    return _json({"detail": refused.message}, refused.status, headers)


async def _body(request: Request, kind: type[T]) -> T:
    """Decode a JSON body, a large one off the event loop. Raises what msgspec raises."""
    raw = await request.body()
    if len(raw) <= _INLINE:
        return msgspec.json.decode(raw, type=kind)
    return await asyncio.to_thread(msgspec.json.decode, raw, type=kind)


class _Ids(msgspec.Struct):
    """Bodies that name one thing."""

    session_id: str = ""
    model_id: str = ""
    request_id: str = ""
    sampling_session_id: str = ""


def _table(service: Service) -> list[tuple[Any, ...]]:
    """Return path, endpoint and method of each route."""
    served = service.settings

    async def constant(owner: Owner, request: Request) -> object:
        return {
            "healthz": {"status": "ok"},
            "telemetry": {"status": "accepted"},
            "config": wire.client_config(owner.tokens_per_call),
            "dynamic_config": {"sample_cancel_enabled": True},
            "get_server_capabilities": {
                "supported_models": [
                    {
                        "model_name": served.base_model,
                        "max_context_length": served.longest,
                        "trainable": True,
                        "sampleable": True,
                    }
                ]
            },
        }[request.url.path.rpartition("/")[2]]

    async def create_session(owner: Owner, request: Request) -> object:
        return {"type": "create_session", "session_id": await service.create_session(owner)}

    async def heartbeat(owner: Owner, request: Request) -> object:
        service.heartbeat(owner, (await _body(request, _Ids)).session_id)
        return {"type": "session_heartbeat"}

    async def finish(owner: Owner, request: Request) -> object:
        await service.finish_session(owner, request.path_params["session"])
        return Response(status_code=204)

    async def create_model(owner: Owner, request: Request) -> object:
        return await service.create_model(owner, await _body(request, wire.CreateModel))

    async def get_info(owner: Owner, request: Request) -> object:
        model = service.model(owner, (await _body(request, _Ids)).model_id)
        data = {"model_name": served.base_model, "tokenizer_id": served.tokenizer or None}
        return {
            "type": "get_info", "model_data": data, "model_id": model.id, "model_name": served.base_model,
            "is_lora": True, "lora_rank": served.lora_rank,
        }  # fmt: skip

    async def unload(owner: Owner, request: Request) -> object:
        model_id = (await _body(request, _Ids)).model_id
        await service.unload(owner, model_id)
        return {"type": "unload_model", "model_id": model_id}

    async def forward_backward(owner: Owner, request: Request) -> object:
        def parse(raw: bytes) -> tuple[str, int, str, bytes]:
            body = wire.inflate(raw, request.headers.get("content-encoding", ""), MAX_BODY)
            message = wire.forward_backward_request(body)
            return message.model_id, message.seq_id, "forward" if message.forward_only else "forward_backward", body

        return await service.accept(owner, *await asyncio.to_thread(parse, await request.body()))

    async def training(owner: Owner, request: Request) -> object:
        kind = request.url.path.rpartition("/")[2]
        types: dict[str, Any] = {
            "optim_step": wire.OptimStep, "save_weights": wire.SaveWeights,
            "save_weights_for_sampler": wire.SaveForSampler,
        }  # fmt: skip
        body = await _body(request, types[kind])
        return await service.accept(owner, body.model_id, body.seq_id, kind, await request.body())

    async def load_weights(owner: Owner, request: Request) -> object:
        return await service.load_weights(owner, await _body(request, wire.LoadWeights))

    async def retrieve(owner: Owner, request: Request) -> object:
        request_id = (await _body(request, _Ids)).request_id
        result = await service.retrieve(owner, request_id)
        if result is None:
            return {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        return Response(result.payload, media_type="application/x-protobuf" if result.proto else "application/json")

    async def cancel(owner: Owner, request: Request) -> object:
        service.cancel(owner, (await _body(request, _Ids)).request_id)
        return Response(status_code=204)

    async def create_sampler(owner: Owner, request: Request) -> object:
        sampler = await service.create_sampler(owner, await _body(request, wire.CreateSampler))
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    async def join_sampler(owner: Owner, request: Request) -> object:
        sampler = (await _body(request, _Ids)).sampling_session_id
        return {"type": "join_sampling_session", "client_counter": service.join(owner, sampler)}

    async def get_sampler(owner: Owner, request: Request) -> object:
        sampler = request.path_params["sampler"]
        target = service.sampler(owner, sampler)
        path = target if target.startswith("tinker:") else None
        return {"sampler_id": sampler, "base_model": served.base_model, "model_path": path}

    async def asample(owner: Owner, request: Request) -> object:
        return service.sample(owner, await _body(request, wire.Sample))

    async def training_run(owner: Owner, request: Request) -> object:
        model = service.model(owner, request.path_params["model"])
        return {
            "training_run_id": model.id, "base_model": served.base_model, "model_owner": model.owner,
            "is_lora": True, "lora_rank": served.lora_rank, "last_request_time": _date(model.last_call),
        }  # fmt: skip

    async def checkpoints(owner: Owner, request: Request) -> object:
        model = service.model(owner, request.path_params["model"])
        saved = [named for path, named in model.names.items() if path.startswith("tinker:")]
        ids = [named.name.split("/", 3)[3] for named in saved]
        kinds = ["sampler" if each.startswith("sampler_") else "training" for each in ids]
        return {
            "checkpoints": [
                {"checkpoint_id": id, "checkpoint_type": kind, "time": _date(named.time), "tinker_path": named.name}
                for id, kind, named in zip(ids, kinds, saved, strict=True)
            ]
        }

    async def delete(owner: Owner, request: Request) -> object:
        await service.delete(owner, request.path_params["model"], request.path_params["name"])
        return Response(status_code=204)

    return [
        ("healthz", constant, "GET"),
        ("get_server_capabilities", constant, "GET"),
        ("client/config", constant),
        ("client/dynamic_config", constant),
        ("telemetry", constant),
        ("create_session", create_session),
        ("session_heartbeat", heartbeat),
        ("sessions/{session}/finish", finish),
        ("create_model", create_model),
        ("get_info", get_info),
        ("unload_model", unload),
        ("forward_backward", forward_backward),
        ("optim_step", training),
        ("save_weights", training),
        ("save_weights_for_sampler", training),
        ("load_weights", load_weights),
        ("retrieve_future", retrieve),
        ("cancel_future", cancel),
        ("create_sampling_session", create_sampler),
        ("join_sampling_session", join_sampler),
        ("samplers/{sampler}", get_sampler, "GET"),
        ("asample", asample),
        ("training_runs/{model}", training_run, "GET"),
        ("training_runs/{model}/checkpoints", checkpoints, "GET"),
        ("training_runs/{model}/checkpoints/{name:path}", delete, "DELETE"),
    ]


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
