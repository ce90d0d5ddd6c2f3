"""The manager's HTTP surface.

Bodies are msgspec Structs, decoded from and encoded to the raw request: no pydantic on the hot routes. State-changing
calls need the trial's token (``realsys.cluster.http.http_guard``). An error is one line: {"error": "..."}.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from realsys.cluster.fence import CheckAlive, unleased
from realsys.cluster.http.http_guard import Guard, Refused
from realsys.errors import MALFORMED, RealsysError
from realsys.manager.messages import (
    AllocateReply,
    AllocateRequest,
    ClaimReply,
    ClaimRequest,
    EvaluateReply,
    EvaluateRequest,
    EvaluationReply,
    FinishReply,
    FinishRequest,
    RollBackReply,
    RollBackRequest,
    ScheduleReply,
    ScheduleRequest,
    TrainedReply,
    TrainedRequest,
    VersionReply,
)
from realsys.manager.metrics import render_metrics
from realsys.manager.overview import status
from realsys.manager.refusals import NoServer, NotRunning, OlderTraining
from realsys.manager.service import ManagerService

log = logging.getLogger(__name__)

MAX_BODY = 4 << 20  # bytes; a /trained of 10,000 tickets is 200 kB
PAGE = Path(__file__).with_name("status_page.html")

T = TypeVar("T", bound=msgspec.Struct)


def reply_json(body: object, status_code: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code, media_type="application/json")


@contextlib.contextmanager
def bad_request(path: str) -> Iterator[None]:
    """ValueError is a caller's mistake: status 400 and one line."""
    try:
        yield
    except ValueError as error:
        log.warning("%s: %s", path, error)
        raise Refused(400, f"{path}: {error}") from error


class ManagerApp:
    """Routes to the service."""

    def __init__(
        self,
        service: ManagerService,
        token: str,
        refresh: Callable[[], Awaitable[None]],
        check_alive: CheckAlive = unleased,
    ) -> None:
        """``refresh`` reads the published version from the name store: a watch may lag behind the caller."""
        self._service, self._refresh, self._token, self._check_alive = service, refresh, token, check_alive
        self._page = PAGE.read_text(encoding="utf-8")

    def build(self) -> Guard:
        """The routes, behind what checks token, size and lease for all of them."""
        app = FastAPI(
            title="realsys gserver_manager",
            openapi_url=None,
            routes=[
                self._post("/allocate_rollout", AllocateRequest, self._allocate),
                self._post("/schedule_request", ScheduleRequest, self._schedule),
                self._post("/finish_rollout", FinishRequest, self._finish),
                self._post("/claim", ClaimRequest, self._claim),
                self._post("/trained", TrainedRequest, self._trained),
                self._post("/roll_back", RollBackRequest, self._roll_back),
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
        return Guard(
            app,
            token=self._token,
            max_body=MAX_BODY,
            error=lambda message: {"error": message},
            secret=("/data_position",),
            check_alive=self._check_alive,
        )

    def _post(self, path: str, kind: type[T], handle: Callable[[T, Request], Awaitable[msgspec.Struct]]) -> Route:
        """A state-changing call: shape, then the handler."""
        decoder = msgspec.json.Decoder(kind)

        async def endpoint(request: Request) -> Response:
            try:
                try:
                    payload = decoder.decode(await request.body())
                except MALFORMED as error:
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

    async def _claim(self, payload: ClaimRequest, request: Request) -> ClaimReply:
        with bad_request("/claim"):
            reply = self._service.claim(payload)
        if isinstance(reply, OlderTraining):
            raise Refused(409, reply.problem)
        return reply

    async def _trained(self, payload: TrainedRequest, request: Request) -> TrainedReply:
        with bad_request("/trained"):
            reply = await self._service.trained(payload)
        if isinstance(reply, OlderTraining):
            raise Refused(409, reply.problem)
        return reply

    async def _roll_back(self, payload: RollBackRequest, request: Request) -> RollBackReply:
        with bad_request("/roll_back"):
            reply = await self._service.roll_back(payload)
        if isinstance(reply, OlderTraining):
            log.error("/roll_back: %s", reply.problem)
            raise Refused(409, reply.problem)
        started = "training side %s starts from version %d: %d tickets re-issued"
        log.info(started, payload.incarnation, payload.version, reply.reissued)
        return reply

    async def _evaluate(self, payload: EvaluateRequest, request: Request) -> EvaluateReply:
        await self._refresh()
        with bad_request("/evaluate"):
            evaluation = self._service.evaluate(payload)
        if isinstance(evaluation, OlderTraining):
            raise Refused(409, evaluation.problem)
        return EvaluateReply(evaluation.started.total)

    async def _evaluation(self, request: Request) -> Response:
        eval_id = request.path_params["eval_id"]
        evaluation = self._service.state.evaluations.get(eval_id)
        if evaluation is None:
            return reply_json({"error": f"no evaluation {eval_id!r} was asked for"}, 404)
        reply: EvaluationReply = evaluation.reply()
        return reply_json(reply)

    async def _position(self, request: Request) -> Response:
        return reply_json(await self._service.position())

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
