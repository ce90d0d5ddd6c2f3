"""Calls of a training script in another process (`realsys.Session`): HTTP with the trial's token.

    script ──POST /call: number, method, arguments──> MasterSession
           <── the result, or "not yet" after HELD_S: the script asks again with the same number ──┘

A call is carried out once, however often it is asked for. The file ``session.json`` of the trial has the address; the
incarnation in it tells the script when the trainer was started anew, from a checkpoint.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import typing
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from realsys.cluster.aio import run_beside
from realsys.cluster.files import write_durably
from realsys.cluster.http_server import Admission, Guard, HttpServer
from realsys.cluster.worker import WorkerContext
from realsys.errors import MALFORMED, ConfigError
from realsys.session import CALLS, FINISH, CallReply, CallRequest, SessionAddress
from realsys.train.master.session import OF_THE_SCRIPT, MasterSession

log = logging.getLogger(__name__)

HELD_S = 10.0
_MAX_BODY = 64 << 20  # bytes; ids and rewards of 10,000 rows are 500 kB
_KEPT = 64  # results that may be asked for again


class ScriptService:
    """Carries out the calls of one script on ``session``."""

    def __init__(self, session: MasterSession) -> None:
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._session = session
        self._calls: dict[int, asyncio.Task[Any]] = {}

    async def call(self, request: CallRequest) -> CallReply:
        """Begin the call, unless it has been asked for before, and wait for its end."""
        if request.method == FINISH:
            if not self.finished.done():
                self.finished.set_result(None)
            return CallReply(done=True)
        if request.number not in self._calls:
            try:
                arguments = _arguments(request)
            except MALFORMED as error:
                raise ConfigError(request.method, request.args, str(error)) from None
            self._calls[request.number] = asyncio.create_task(self._session.perform(request.method, *arguments))
            for number in [number for number, task in self._calls.items() if task.done()][:-_KEPT]:
                del self._calls[number]
        task = self._calls[request.number]
        await asyncio.wait({task}, timeout=HELD_S)
        return CallReply(done=True, result=task.result()) if task.done() else CallReply()


@functools.cache
def _types(method: str) -> list[Any]:
    hints = typing.get_type_hints(getattr(MasterSession, method))
    return [hint for name, hint in hints.items() if name != "return"]


def _arguments(request: CallRequest) -> list[Any]:
    """Return the arguments with their types. Raises ConfigError, and what msgspec raises."""
    if request.method not in CALLS:
        raise ConfigError("method", request.method, f"must be one of {', '.join(CALLS)}")
    types = _types(request.method)
    if len(request.args) != len(types):
        raise ConfigError(request.method, request.args, f"takes {len(types)} arguments")
    return [msgspec.convert(value, kind) for value, kind in zip(request.args, types, strict=True)]


async def serve(session: MasterSession, ctx: WorkerContext) -> None:
    """Serve the calls of a script until it has finished."""
    service = ScriptService(session)
    decoder = msgspec.json.Decoder(CallRequest)

    async def endpoint(request: Request) -> Response:
        try:
            reply = await service.call(decoder.decode(await request.body()))
        except MALFORMED as error:
            return Response(msgspec.json.encode({"error": str(error)}), 400)
        except OF_THE_SCRIPT as error:
            reply = CallReply(done=True, error=type(error).__name__, message=str(error))
        except Exception as error:
            if not service.finished.done():
                service.finished.set_exception(error)
            await asyncio.sleep(HELD_S)  # the run ends meanwhile, and the script learns why from its launcher
            raise
        return Response(msgspec.msgpack.encode(reply), media_type="application/msgpack")

    app = Guard(
        Starlette(routes=[Route("/call", endpoint, methods=["POST"])]),
        Admission(ctx.token, (), ctx.check_alive),
        max_body=_MAX_BODY,
        error=lambda message: {"error": message},
    )
    server = HttpServer(app, ctx.config.cluster.host)
    address = SessionAddress(server.url, ctx.incarnation)

    async def until_finished() -> None:
        try:
            await service.finished
        finally:
            server.stop()

    def ready() -> None:
        write_durably(ctx.paths.session, msgspec.json.encode(address))
        log.info("waiting for the training script at %s", server.url)

    await run_beside(server.serve(ready), until_finished())
