"""HTTP surface of a generation engine: FastAPI routes over raw msgspec bodies, and the uvicorn thread that serves them.

A bad request answers 400, one without the token 401, one that is too large 413, a full queue or a stopping server
503; always {"error": {"message": one line}}.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp

from realsys.cluster.fence import CheckAlive, unleased
from realsys.cluster.http.http_guard import BoundedRequest, Guard
from realsys.cluster.network import advertised_host, bind_tcp, join_host_port, port_of
from realsys.errors import MALFORMED, GenerationError, WaitTimeout
from realsys.generation import protocol as p
from realsys.generation.backend import Completion, GenerationEngine

MAX_BODY = 16 << 20  # bytes; a prompt of a million tokens is 7 MB
MAX_MESSAGE = 2000  # characters of an error, which may quote what it refuses

T = TypeVar("T")
_log = logging.getLogger(__name__)


def build_app(engine: GenerationEngine, *, token: str | None = None, check_alive: CheckAlive = unleased) -> Guard:
    """The routes of protocol.py over one engine. ``token``: what every POST must carry; None for a server that stands
    alone on loopback. Nothing is accepted or answered once ``check_alive`` raises.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    def post(path: str, kind: type[T]) -> Callable[[Callable[[T, Request], Awaitable[Any]]], None]:
        """Register a handler whose body is decoded to ``kind`` and whose result is encoded as JSON."""
        decoder = msgspec.json.Decoder(kind)

        def register(handler: Callable[[T, Request], Awaitable[Any]]) -> None:
            async def route(request: Request) -> Response:
                try:
                    body = decoder.decode(await request.body() or b"{}")
                except MALFORMED as error:
                    return _error(400, f"{path}: {error}")
                try:
                    return _reply(await handler(body, request))
                except GenerationError as error:
                    return _error(503 if error.retryable else 400, str(error))
                except ValueError as error:
                    return _error(400, f"{path}: {error}")

            app.add_api_route(path, route, methods=["POST"], response_model=None)

        return register

    @post("/generate", p.GenerateRequest)
    async def generate(body: p.GenerateRequest, request: Request) -> Any:
        rid = body.rid or secrets.token_hex(16)
        future = asyncio.wrap_future(engine.generate(rid, body.input_ids, body.sampling_params))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((future, gone), return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                # Nobody reads the answer any more: give its slots to those who wait.
                await asyncio.wrap_future(engine.abort(rid))
            results = await future
        finally:
            gone.cancel()
        completions = [_completion(engine, rid, body, result) for result in results]
        return completions if body.sampling_params.n > 1 else completions[0]

    @post("/update_weights_from_disk", p.UpdateRequest)
    async def update_weights(body: p.UpdateRequest, _: Request) -> p.UpdateResult:
        version = p.parse_version(body.weight_version)
        future = engine.update(body.model_path, version, abort_all=body.abort_all_requests)
        return await asyncio.wrap_future(future)

    @post("/pause_generation", p.PauseRequest)
    async def pause(body: p.PauseRequest, _: Request) -> p.Acknowledged:
        await asyncio.wrap_future(engine.pause(body.mode))
        return p.Acknowledged(message=f"paused ({body.mode})")

    @post("/continue_generation", p.Nothing)
    async def resume(_body: p.Nothing, _: Request) -> p.Acknowledged:
        await asyncio.wrap_future(engine.resume())
        return p.Acknowledged(message="running")

    @post("/abort_request", p.AbortRequest)
    async def abort(body: p.AbortRequest, _: Request) -> p.Acknowledged:
        if body.abort_all:
            await asyncio.wrap_future(engine.abort_all())
            return p.Acknowledged(message="all requests aborted")
        if not body.rid:
            raise GenerationError("/abort_request needs rid, or abort_all=true")
        found = await asyncio.wrap_future(engine.abort(body.rid))
        return p.Acknowledged(message="aborted" if found else f"no request {body.rid!r} in progress")

    @post("/flush_cache", p.Nothing)
    async def flush_cache(_body: p.Nothing, _: Request) -> p.Acknowledged:
        return p.Acknowledged(message="nothing is cached beyond the running answers")

    @app.get("/health", response_model=None)
    async def health() -> Response:
        return _reply(p.Acknowledged()) if engine.failure is None else _error(503, engine.failure)

    @app.get("/model_info", response_model=None)
    async def model_info() -> Response:
        return _reply(p.ModelInfo(engine.model_path, str(engine.version), engine.model_path))

    @app.get("/server_info", response_model=None)
    async def server_info() -> Response:
        info = engine.info()
        return _reply(await asyncio.wrap_future(info) if isinstance(info, Future) else info)

    def error(message: str) -> p.ErrorReply:
        return p.ErrorReply(p.ErrorDetail(message))

    return Guard(app, token=token, max_body=MAX_BODY, error=error, check_alive=check_alive)


class HttpServer:
    """uvicorn in a thread of its own, on a socket that is bound here: ``url`` is right as soon as it is there."""

    def __init__(self, app: ASGIApp, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket = bind_tcp(host, port)
        self.url = f"http://{join_host_port(advertised_host(host), port_of(self._socket))}"
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=BoundedRequest,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=3,
            timeout_keep_alive=75,
        )
        self._started = threading.Event()
        self._server = _Server(config, self._started)
        self._thread = threading.Thread(target=self._run, name="generation-http", daemon=True)

    def start(self, timeout_s: float = 30.0) -> None:
        """Serve. Returns when requests are answered; raises WaitTimeout if that takes too long."""
        self._thread.start()
        if not self._started.wait(timeout_s):
            raise WaitTimeout(f"the HTTP server at {self.url} did not start within {timeout_s:g} s")

    def close(self, timeout_s: float = 8.0) -> None:
        """Finish the replies that are due and stop."""
        self._server.should_exit = True
        self._thread.join(timeout_s)
        self._socket.close()
        if self._thread.is_alive():
            raise WaitTimeout(f"the HTTP server at {self.url} did not stop within {timeout_s:g} s")

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])
        if not self._server.should_exit:
            raise RuntimeError(f"the HTTP server at {self.url} ended by itself")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: threading.Event) -> None:
        super().__init__(config)
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started.set()


async def _disconnected(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _completion(engine: GenerationEngine, rid: str, body: p.GenerateRequest, result: Completion) -> p.CompletionReply:
    tokens: list[int] = result.tokens.tolist()
    reason = result.finish_reason
    finish = p.Finish(
        type=reason,
        matched=result.matched,
        length=len(tokens) if reason == "length" else None,
        message="aborted by a call or because the client went away" if reason == "abort" else None,
    )
    logprobs: list[tuple[float, int, str | None]] | None = None
    if body.return_logprob:
        logprobs = list(zip(result.logprobs.tolist(), tokens, itertools.repeat(None), strict=False))
    meta = p.MetaInfo(
        id=rid,
        finish_reason=finish,
        prompt_tokens=len(body.input_ids),
        completion_tokens=len(tokens),
        weight_version=str(result.segments[-1][0] if result.segments else engine.version),
        weight_versions=p.segments_of(result.segments),
        output_token_logprobs=logprobs,
    )
    return p.CompletionReply(tokens, meta)


def _reply(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _error(status: int, message: str) -> Response:
    body = msgspec.json.encode(p.ErrorReply(p.ErrorDetail(message[:MAX_MESSAGE])))
    return Response(body, status_code=status, media_type="application/json")
