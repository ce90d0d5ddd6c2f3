"""The manager's HTTP surface.

Bodies are msgspec Structs, decoded from and encoded to the raw request: no pydantic on the hot routes. State-changing
calls need the trial's token. An error is one line: {"error": "..."}.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from realsys.admission.manager import NoServer, NotRunning
from realsys.admission.messages import (
    AllocateReply,
    AllocateRequest,
    EvaluateReply,
    EvaluateRequest,
    EvaluationReply,
    FinishReply,
    FinishRequest,
    ScheduleReply,
    ScheduleRequest,
    TrainedReply,
    TrainedRequest,
    VersionReply,
)
from realsys.admission.status import status
from realsys.errors import RealsysError
from workers.manager_metrics import render_metrics
from workers.manager_service import ManagerService

log = logging.getLogger(__name__)

MAX_BODY = 4 << 20  # bytes; a /trained of 10,000 tickets is 200 kB
PAGE = Path(__file__).with_name("status_page.html")

T = TypeVar("T", bound=msgspec.Struct)


class Refused(Exception):
    """Ends a request with this status and one line."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(message)


def reply_json(body: object, status_code: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code, media_type="application/json")


async def read_body(request: Request, limit: int = MAX_BODY) -> bytes:
    """The whole body, refused as soon as it is known to be larger than ``limit``."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise Refused(413, f"{request.url.path}: body of {declared} bytes is over the limit of {limit}")
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise Refused(413, f"{request.url.path}: body is over the limit of {limit} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


class ManagerApp:
    """Routes to the service."""

    def __init__(self, service: ManagerService, token: str, refresh: Callable[[], Awaitable[None]]) -> None:
        """``refresh`` reads the published version from the name store: a watch may lag behind the caller."""
        self._service, self._refresh = service, refresh
        self._authorization = f"Bearer {token}".encode()
        self._page = PAGE.read_text(encoding="utf-8")

    def build(self) -> FastAPI:
        return FastAPI(
            title="realsys gserver_manager",
            openapi_url=None,
            routes=[
                self._post("/allocate_rollout", AllocateRequest, self._allocate),
                self._post("/schedule_request", ScheduleRequest, self._schedule),
                self._post("/finish_rollout", FinishRequest, self._finish),
                self._post("/trained", TrainedRequest, self._trained),
                self._post("/evaluate", EvaluateRequest, self._evaluate),
                Route("/evaluate/{eval_id}", self._evaluation),
                Route("/data_position", self._position),
                Route("/get_model_version", self._version),
                Route("/health", self._health),
                Route("/status", self._status),
                Route("/metrics", self._metrics),
                Route("/", self._index),
            ],
        )

    def _post(self, path: str, kind: type[T], handle: Callable[[T, Request], Awaitable[msgspec.Struct]]) -> Route:
        """A state-changing call: token, size, shape, then the handler."""
        decoder = msgspec.json.Decoder(kind)

        async def endpoint(request: Request) -> Response:
            try:
                self._authorize(request)
                body = await read_body(request)
                try:
                    payload = decoder.decode(body)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise Refused(400, f"{path}: {error}") from error
                return reply_json(await handle(payload, request))
            except Refused as refused:
                return reply_json({"error": refused.message}, refused.status)
            except ClientDisconnect:
                return Response(status_code=400)
            except RealsysError as error:
                log.error("%s: %s", path, error)
                return reply_json({"error": str(error)}, 500)

        return Route(path, endpoint, methods=["POST"])

    def _authorize(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, self._authorization):
            raise Refused(401, f"{request.url.path}: needs the trial's token: Authorization: Bearer <token>")

    async def _allocate(self, payload: AllocateRequest, request: Request) -> AllocateReply:
        return await self._service.allocate(payload, request.is_disconnected)

    async def _schedule(self, payload: ScheduleRequest, request: Request) -> ScheduleReply:
        reply = await self._service.schedule(payload)
        if isinstance(reply, NoServer):
            raise Refused(503, reply.problem)
        if isinstance(reply, NotRunning):
            raise Refused(409, reply.problem)
        return reply

    async def _finish(self, payload: FinishRequest, request: Request) -> FinishReply:
        return self._service.finish(payload)

    async def _trained(self, payload: TrainedRequest, request: Request) -> TrainedReply:
        return await self._service.trained(payload)

    async def _evaluate(self, payload: EvaluateRequest, request: Request) -> EvaluateReply:
        await self._refresh()
        try:
            return EvaluateReply(self._service.evaluate(payload).started.total)
        except ValueError as error:
            raise Refused(400, f"/evaluate: {error}") from error

    async def _evaluation(self, request: Request) -> Response:
        eval_id = request.path_params["eval_id"]
        evaluation = self._service.state.evaluations.get(eval_id)
        if evaluation is None:
            return reply_json({"error": f"no evaluation {eval_id!r} was asked for"}, 404)
        reply: EvaluationReply = evaluation.reply()
        return reply_json(reply)

    async def _position(self, request: Request) -> Response:
        try:
            self._authorize(request)
        except Refused as refused:
            return reply_json({"error": refused.message}, refused.status)
        return reply_json(self._service.state.ledger.position())

    async def _version(self, request: Request) -> Response:
        return reply_json(VersionReply(self._service.state.version))

    async def _health(self, request: Request) -> Response:
        return reply_json({"status": "ok"})

    async def _status(self, request: Request) -> Response:
        return reply_json(status(self._service.state, self._service.clock(), self._service.started))

    async def _metrics(self, request: Request) -> Response:
        body, content_type = render_metrics(self._service.state, self._service.clock())
        return Response(body, headers={"content-type": content_type})

    async def _index(self, request: Request) -> Response:
        return HTMLResponse(self._page)
