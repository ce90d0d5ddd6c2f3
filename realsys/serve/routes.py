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

    routes = Starlette(routes=[route(*row) for row in _Routes(service).table()])
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


class _Routes:
    """An endpoint for each route, or for several of a kind."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._served = service.settings

    def table(self) -> list[tuple[Any, ...]]:
        """Return path, endpoint and method of each route."""
        return [
            ("healthz", self.constant, "GET"),
            ("get_server_capabilities", self.constant, "GET"),
            ("client/config", self.constant),
            ("client/dynamic_config", self.constant),
            ("telemetry", self.constant),
            ("create_session", self.create_session),
            ("session_heartbeat", self.heartbeat),
            ("sessions/{session}/finish", self.finish),
            ("create_model", self.create_model),
            ("get_info", self.get_info),
            ("unload_model", self.unload),
            ("forward_backward", self.forward_backward),
            ("optim_step", self.training),
            ("save_weights", self.training),
            ("save_weights_for_sampler", self.training),
            ("load_weights", self.load_weights),
            ("retrieve_future", self.retrieve),
            ("cancel_future", self.cancel),
            ("create_sampling_session", self.create_sampler),
            ("join_sampling_session", self.join_sampler),
            ("samplers/{sampler}", self.get_sampler, "GET"),
            ("asample", self.asample),
            ("training_runs/{model}", self.training_run, "GET"),
            ("training_runs/{model}/checkpoints", self.checkpoints, "GET"),
            ("training_runs/{model}/checkpoints/{name:path}", self.delete, "DELETE"),
        ]

    async def constant(self, owner: Owner, request: Request) -> object:
        return {
            "healthz": {"status": "ok"},
            "telemetry": {"status": "accepted"},
            "config": wire.client_config(owner.tokens_per_call),
            "dynamic_config": {"sample_cancel_enabled": True},
            "get_server_capabilities": {
                "supported_models": [
                    {
                        "model_name": self._served.base_model,
                        "max_context_length": self._served.longest,
                        "trainable": True,
                        "sampleable": True,
                    }
                ]
            },
        }[request.url.path.rpartition("/")[2]]

    async def create_session(self, owner: Owner, request: Request) -> object:
        return {"type": "create_session", "session_id": await self._service.create_session(owner)}

    async def heartbeat(self, owner: Owner, request: Request) -> object:
        self._service.heartbeat(owner, (await _body(request, _Ids)).session_id)
        return {"type": "session_heartbeat"}

    async def finish(self, owner: Owner, request: Request) -> object:
        await self._service.finish_session(owner, request.path_params["session"])
        return Response(status_code=204)

    async def create_model(self, owner: Owner, request: Request) -> object:
        return await self._service.create_model(owner, await _body(request, wire.CreateModel))

    async def get_info(self, owner: Owner, request: Request) -> object:
        model = self._service.model(owner, (await _body(request, _Ids)).model_id)
        data = {"model_name": self._served.base_model, "tokenizer_id": self._served.tokenizer or None}
        return {
            "type": "get_info", "model_data": data, "model_id": model.id, "model_name": self._served.base_model,
            "is_lora": True, "lora_rank": self._served.lora_rank,
        }  # fmt: skip

    async def unload(self, owner: Owner, request: Request) -> object:
        model_id = (await _body(request, _Ids)).model_id
        await self._service.unload(owner, model_id)
        return {"type": "unload_model", "model_id": model_id}

    async def forward_backward(self, owner: Owner, request: Request) -> object:
        def parse(raw: bytes) -> tuple[str, int, str, bytes]:
            body = wire.inflate(raw, request.headers.get("content-encoding", ""), MAX_BODY)
            message = wire.forward_backward_request(body)
            return message.model_id, message.seq_id, "forward" if message.forward_only else "forward_backward", body

        return await self._service.accept(owner, *await asyncio.to_thread(parse, await request.body()))

    async def training(self, owner: Owner, request: Request) -> object:
        kind = request.url.path.rpartition("/")[2]
        types: dict[str, Any] = {
            "optim_step": wire.OptimStep, "save_weights": wire.SaveWeights,
            "save_weights_for_sampler": wire.SaveForSampler,
        }  # fmt: skip
        body = await _body(request, types[kind])
        return await self._service.accept(owner, body.model_id, body.seq_id, kind, await request.body())

    async def load_weights(self, owner: Owner, request: Request) -> object:
        return await self._service.load_weights(owner, await _body(request, wire.LoadWeights))

    async def retrieve(self, owner: Owner, request: Request) -> object:
        request_id = (await _body(request, _Ids)).request_id
        result = await self._service.retrieve(owner, request_id)
        if result is None:
            return {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        return Response(result.payload, media_type="application/x-protobuf" if result.proto else "application/json")

    async def cancel(self, owner: Owner, request: Request) -> object:
        self._service.cancel(owner, (await _body(request, _Ids)).request_id)
        return Response(status_code=204)

    async def create_sampler(self, owner: Owner, request: Request) -> object:
        sampler = await self._service.create_sampler(owner, await _body(request, wire.CreateSampler))
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    async def join_sampler(self, owner: Owner, request: Request) -> object:
        sampler = (await _body(request, _Ids)).sampling_session_id
        return {"type": "join_sampling_session", "client_counter": self._service.join(owner, sampler)}

    async def get_sampler(self, owner: Owner, request: Request) -> object:
        sampler = request.path_params["sampler"]
        target = self._service.sampler(owner, sampler)
        path = target if target.startswith("tinker:") else None
        return {"sampler_id": sampler, "base_model": self._served.base_model, "model_path": path}

    async def asample(self, owner: Owner, request: Request) -> object:
        return self._service.sample(owner, await _body(request, wire.Sample))

    async def training_run(self, owner: Owner, request: Request) -> object:
        model = self._service.model(owner, request.path_params["model"])
        return {
            "training_run_id": model.id, "base_model": self._served.base_model, "model_owner": model.owner,
            "is_lora": True, "lora_rank": self._served.lora_rank, "last_request_time": _date(model.last_call),
        }  # fmt: skip

    async def checkpoints(self, owner: Owner, request: Request) -> object:
        model = self._service.model(owner, request.path_params["model"])
        saved = [named for path, named in model.names.items() if path.startswith("tinker:")]
        ids = [named.name.split("/", 3)[3] for named in saved]
        kinds = ["sampler" if each.startswith("sampler_") else "training" for each in ids]
        return {
            "checkpoints": [
                {"checkpoint_id": id, "checkpoint_type": kind, "time": _date(named.time), "tinker_path": named.name}
                for id, kind, named in zip(ids, kinds, saved, strict=True)
            ]
        }

    async def delete(self, owner: Owner, request: Request) -> object:
        await self._service.delete(owner, request.path_params["model"], request.path_params["name"])
        return Response(status_code=204)


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
