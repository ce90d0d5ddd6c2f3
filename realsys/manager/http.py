"""The manager's HTTP surface: a route for each row of ``operations``, the metrics, and the routes of its caller's page.

Bodies are msgspec Structs, decoded from and encoded to the raw request: no pydantic on the hot routes. State-changing
calls need the trial's token (``realsys.cluster.http.http_guard``). An error is one line: {"error": "..."}.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from realsys.cluster.fence import CheckAlive, unleased
from realsys.cluster.http.http_guard import Admission, Guard
from realsys.errors import MALFORMED, RealsysError
from realsys.manager.metrics import render_metrics
from realsys.manager.operations import OPERATIONS, Operation
from realsys.manager.refusals import BadCall, OlderTrainer, Refusal
from realsys.manager.service import ManagerService
from realsys.observe.step_log import StepRecord

log = logging.getLogger(__name__)

MAX_BODY = 4 << 20  # bytes; a /trained of 10,000 tickets is 200 kB


@dataclass(frozen=True, slots=True)
class Pages:
    """Routes for people and for Prometheus.

    routes   further routes
    secret   paths of them that need the token
    records  reads the newest records of the step log for /metrics; it runs in a thread
    """

    routes: Collection[BaseRoute] = ()
    secret: Collection[str] = ()
    records: Callable[[], list[StepRecord]] = list


NO_PAGES = Pages()


class ManagerApp:
    """Builds the routes to the service."""

    def __init__(
        self,
        service: ManagerService,
        token: str,
        refresh: Callable[[], Awaitable[None]],
        check_alive: CheckAlive = unleased,
        pages: Pages = NO_PAGES,
    ) -> None:
        """``refresh`` reads the published version from the name store: a watch may lag behind the caller."""
        self._service = service
        self._token = token
        self._refresh = refresh
        self._check_alive = check_alive
        self._pages = pages

    def build(self) -> Guard:
        """Return the routes behind the guard that checks token, size and lease for all of them."""
        routes: list[BaseRoute] = [self._route(operation) for operation in OPERATIONS]
        routes += [Route("/metrics", self._metrics), *self._pages.routes]
        secret = (*(operation.path for operation in OPERATIONS if operation.secret), *self._pages.secret)
        return Guard(
            FastAPI(title="realsys gserver_manager", openapi_url=None, routes=routes),
            Admission(self._token, secret, self._check_alive),
            max_body=MAX_BODY,
            error=lambda message: {"error": message},
        )

    def _route(self, operation: Operation[Any, Any]) -> Route:
        """Return the route of an operation: decode, call, encode; every refusal becomes its status here."""
        decoder = msgspec.json.Decoder(operation.request) if operation.is_post else None

        async def argument(request: Request) -> Any:
            if decoder is None:
                return next(iter(request.path_params.values()), None)
            try:
                return decoder.decode(await request.body())
            except MALFORMED as error:
                raise BadCall(str(error)) from error

        async def endpoint(request: Request) -> Response:
            try:
                body = await argument(request)
                if operation.refresh:
                    await self._refresh()
                reply = await self._service.call(operation, body, request.is_disconnected)
                if operation.log_line is not None:
                    log.info(operation.log_line(body, reply))
                return _json(reply)
            except Refusal as refusal:
                if isinstance(refusal, BadCall | OlderTrainer):
                    log.warning("%s: %s", operation.path, refusal)
                prefix = f"{operation.path}: " if isinstance(refusal, BadCall) else ""
                return _json({"error": f"{prefix}{refusal}"}, refusal.status)
            except ClientDisconnect:
                return Response(status_code=400)
            except RealsysError as error:
                log.error("%s: %s", operation.path, error)
                return _json({"error": str(error)}, 500)

        return Route(operation.path, endpoint, methods=["POST" if operation.is_post else "GET"])

    async def _metrics(self, request: Request) -> Response:
        records = await asyncio.to_thread(self._pages.records)
        body, content_type = render_metrics(self._service.state, self._service.clock(), records)
        return Response(body, headers={"content-type": content_type})


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
