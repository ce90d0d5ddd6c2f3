"""A generation engine as a service of its trial: HTTP routes, and the registration in the name store.

    client ──HTTP──> routes of protocol.py, over raw msgspec bodies ──> engine
    engine ──Change──────> queue ──> keep_registered: register, withdraw, or end the process
    signal ──StopServing───┘
    snapshots of a request ──Delta.next──> ProgressLine ──HTTP──> client.Received, before the reply

Status 400 for a bad request, 401 without the token, 413 for a body that is too large, 429 for a full queue, 503 for a
server that does not serve. The body is then {"error": {"message": one line}}.

A server is registered while its engine serves, and only then. An engine in a child process that was restarted has lost
its weights. Its server then registers as a new incarnation, which the manager treats as a new server: it loads and
verifies the newest version before it routes to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import queue
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from realsys.cluster.http_server import Admission, Guard, HttpServer
from realsys.cluster.lease import CheckAlive, unleased
from realsys.cluster.process import gpu_peak_bytes, resident_bytes
from realsys.cluster.worker import WorkerContext
from realsys.errors import MALFORMED, GenerationError, ServerBusy
from realsys.generation import protocol as p
from realsys.generation.backend import Change, GenerationEngine, RequestSnapshot
from realsys.generation.completion import Completion
from realsys.types import ServerAddress

log = logging.getLogger(__name__)

MAX_BODY = 16 << 20  # bytes; a prompt of a million tokens is 7 MB
STREAM_S = 0.02  # shortest time between two lines of a stream: a line costs as much as some steps of a small model
_FIRST_S = 0.001  # the same, for each token so far: the first line may have no text to show
_LATER_S = 5e-6  # added to STREAM_S for each token so far: a snapshot copies all of them
MAX_MESSAGE = 2000  # characters of an error, which may quote a refused value

_HAND_OVER_S = 2.0  # bound on the end of the open requests when the server stops

T = TypeVar("T")


def build_app(
    engine: GenerationEngine,
    *,
    token: str | None = None,
    check_alive: CheckAlive = unleased,
    offer: Callable[[str, Sequence[str], bool], None] = lambda *_: None,
) -> Guard:
    """Return the routes over one engine, behind the guard.

    ``offer`` gets locator and sources of a version before the engine stages it, and whether it may be older.
    ``token`` is what every POST must carry; None only for a server on loopback without a trial.
    """
    calls = _Calls(engine, offer)
    routes: list[BaseRoute] = [
        _post("/generate", p.GenerateRequest, calls.generate),
        _post("/update_weights_from_disk", p.UpdateRequest, calls.update_weights),
        _post("/pause_generation", p.PauseRequest, calls.pause),
        _post("/continue_generation", p.Nothing, calls.resume),
        _post("/release_memory_occupation", p.Nothing, calls.sleep),
        _post("/resume_memory_occupation", p.Nothing, calls.wake),
        _post("/abort_request", p.AbortRequest, calls.abort),
        _post("/flush_cache", p.Nothing, calls.flush_cache),
        Route("/health", calls.health),
        Route("/model_info", calls.model_info),
        Route("/server_info", calls.server_info),
    ]
    app = Starlette(routes=routes)
    return Guard(app, Admission(token, check_alive=check_alive), max_body=MAX_BODY, error=_error_body)


def _post(path: str, kind: type[T], handle: Callable[[T, Request], Awaitable[Any]]) -> Route:
    """Make a route whose body is decoded to ``kind`` and whose result is encoded as JSON."""
    decoder = msgspec.json.Decoder(kind)

    async def endpoint(request: Request) -> Response:
        try:
            body = decoder.decode(await request.body() or b"{}")
        except MALFORMED as error:
            return _error(400, f"{path}: {error}")
        try:
            result = await handle(body, request)
            return result if isinstance(result, Response) else _reply(result)
        except GenerationError as error:
            return _error(_status(error), str(error))
        except ValueError as error:
            return _error(400, f"{path}: {error}")

    return Route(path, endpoint, methods=["POST"])


class _Calls:
    """Handlers of the routes."""

    def __init__(self, engine: GenerationEngine, offer: Callable[[str, Sequence[str], bool], None]) -> None:
        self._engine = engine
        self._offer = offer

    async def generate(self, body: p.GenerateRequest, request: Request) -> Any:
        rid, streams = body.rid or secrets.token_hex(16), body.stream and body.progress_s > 0
        # An engine that was written before there were adapters has no such parameter.
        adapted = {} if body.adapter is None else {"adapter": body.adapter}
        future = asyncio.wrap_future(
            self._engine.generate(rid, body.input_ids, body.sampling_params, stream=streams, **adapted)
        )
        client_left = asyncio.create_task(_disconnected(request))
        news: asyncio.Future[RequestSnapshot | None] | None = None
        try:
            if streams:
                news = self._news(rid, 0)
            # A short reply is one piece, with the status of its error.
            await asyncio.wait(
                [each for each in (future, client_left, news) if each is not None],
                timeout=body.progress_s or None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if client_left.done():
                # The client closed the connection: free its slots for the requests that wait.
                await asyncio.wrap_future(self._engine.abort(rid))
        finally:
            client_left.cancel()
        if not future.done():
            return StreamingResponse(self._lines(rid, body, future, news), media_type="application/json")
        return self._completions(rid, body, await future)

    def _news(self, rid: str, beyond: int) -> asyncio.Future[RequestSnapshot | None]:
        news = asyncio.wrap_future(self._engine.snapshot(rid, beyond))
        # The request has the same error, and is the one that is awaited.
        news.add_done_callback(lambda done: done.cancelled() or done.exception())
        return news

    async def _lines(
        self,
        rid: str,
        body: p.GenerateRequest,
        future: asyncio.Future[list[Completion]],
        news: asyncio.Future[RequestSnapshot | None] | None,
    ) -> AsyncIterator[bytes]:
        """Yield a ProgressLine whenever the request has moved, then the reply, or a line with its error.

        ``news``: of a stream, the state of the request when it has a token.
        """
        delta = Delta()
        try:
            while not future.done():
                due = news if news is not None and news.done() else None
                snapshot = await (due or asyncio.wrap_future(self._engine.snapshot(rid)))
                if snapshot is not None and (progress := delta.next(snapshot)) is not None:
                    yield msgspec.json.encode(progress) + b"\n"
                pace_s = min(_FIRST_S * delta.tokens, STREAM_S + _LATER_S * delta.tokens)
                await asyncio.wait((future,), timeout=body.progress_s if news is None else pace_s)
                if news is not None and not future.done():
                    news = news if due is None else self._news(rid, delta.tokens)
                    await asyncio.wait((future, news), timeout=body.progress_s, return_when=asyncio.FIRST_COMPLETED)
            yield msgspec.json.encode(self._completions(rid, body, await future))
        except GenerationError as error:
            yield msgspec.json.encode(p.ProgressLine([], _status(error), str(error)[:MAX_MESSAGE])) + b"\n"
        finally:
            if not future.done():  # the client closed the connection
                with contextlib.suppress(GenerationError):
                    self._engine.abort(rid)

    def _completions(self, rid: str, body: p.GenerateRequest, results: list[Completion]) -> Any:
        completions = [_completion(self._engine, rid, body, result) for result in results]
        return completions if body.sampling_params.n > 1 else completions[0]

    async def update_weights(self, body: p.UpdateRequest, _: Request) -> p.UpdateResult:
        version = p.parse_version(body.weight_version)
        self._offer(body.model_path, body.sources, body.older)
        future = self._engine.update(body.model_path, version, abort_all=body.abort_all_requests)
        return await asyncio.wrap_future(future)

    async def pause(self, body: p.PauseRequest, _: Request) -> p.Acknowledged:
        await asyncio.wrap_future(self._engine.pause(body.mode))
        return p.Acknowledged(message=f"paused ({body.mode})")

    async def resume(self, _body: p.Nothing, _: Request) -> p.Acknowledged:
        await asyncio.wrap_future(self._engine.resume())
        return p.Acknowledged(message="running")

    async def sleep(self, _body: p.Nothing, _: Request) -> p.Acknowledged:
        await asyncio.wrap_future(self._engine.sleep())
        return p.Acknowledged(message="asleep")

    async def wake(self, _body: p.Nothing, _: Request) -> p.Acknowledged:
        await asyncio.wrap_future(self._engine.wake())
        return p.Acknowledged(message="awake; an update loads the weights")

    async def abort(self, body: p.AbortRequest, _: Request) -> p.Acknowledged:
        if body.abort_all:
            await asyncio.wrap_future(self._engine.abort_all())
            return p.Acknowledged(message="all requests aborted")
        if not body.rid:
            raise GenerationError("/abort_request needs rid, or abort_all=true")
        running = await asyncio.wrap_future(self._engine.abort(body.rid))
        return p.Acknowledged(message="aborted" if running else f"no request {body.rid!r} in progress")

    async def flush_cache(self, _body: p.Nothing, _: Request) -> p.Acknowledged:
        await asyncio.wrap_future(self._engine.flush())
        return p.Acknowledged(message="nothing is cached beyond the running completions")

    async def health(self, _: Request) -> Response:
        failure = self._engine.failure
        return _reply(p.Acknowledged()) if failure is None else _error(503, failure)

    async def model_info(self, _: Request) -> Response:
        path = self._engine.model_path
        return _reply(p.ModelInfo(path, str(self._engine.version), path))

    async def server_info(self, _: Request) -> Response:
        found = self._engine.info()
        info = await asyncio.wrap_future(found) if isinstance(found, Future) else found
        # The engine has counted the processes that it has started, and runs itself in this one.
        memory, peak = info.memory_bytes + resident_bytes(), max(info.gpu_peak_bytes, gpu_peak_bytes())
        return _reply(msgspec.structs.replace(info, memory_bytes=memory, gpu_peak_bytes=peak))


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
        weight_version=str(segments[-1][0] if (segments := result.segments) else (body.adapter or engine).version),
        weight_versions=p.segments_of(segments),
        kv_versions=None if result.kv_segments is None else p.segments_of(result.kv_segments),
        output_token_logprobs=logprobs,
        output_top_logprobs=None if result.top is None else [[(v, t, None) for t, v in best] for best in result.top],
    )
    return p.CompletionReply(tokens, meta)


def _status(error: GenerationError) -> int:
    if isinstance(error, ServerBusy):
        return 429
    return 503 if error.retryable else 400


def _reply(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _error(status: int, message: str) -> Response:
    return Response(msgspec.json.encode(_error_body(message)), status_code=status, media_type="application/json")


def _error_body(message: str) -> p.ErrorReply:
    return p.ErrorReply(p.ErrorDetail(message[:MAX_MESSAGE]))


# ---- tokens on their way before the reply


class Delta:
    """The part of a request's snapshots that its client does not have yet."""

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}  # completion -> tokens
        self._ended: set[int] = set()
        self._moved: int | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens that the client has, of all completions."""
        return sum(self._sent.values())

    def next(self, snapshot: RequestSnapshot) -> p.ProgressLine | None:
        """Return the next line; None if nothing has moved since the last one."""
        moved, self._moved = self._moved, snapshot.moved
        parts = [
            self._part(index, completion, index in snapshot.running)
            for index, completion in enumerate(snapshot.completions)
            if self._is_new(index, completion, index in snapshot.running)
        ]
        return p.ProgressLine(parts) if parts or moved != snapshot.moved else None

    def _is_new(self, index: int, completion: Completion, running: bool) -> bool:
        ended = not running and index not in self._ended
        return ended or len(completion.tokens) > self._sent.get(index, 0)

    def _part(self, index: int, completion: Completion, running: bool) -> p.ProgressPart:
        begin = self._sent.get(index, 0)
        self._sent[index] = len(completion.tokens)
        if not running:
            self._ended.add(index)
        new = completion.part(begin)
        return p.ProgressPart(
            index,
            begin,
            new.tokens.tolist(),
            new.logprobs.tolist(),
            p.segments_of(new.segments),
            None if running else new.finish_reason,
            None if new.kv_segments is None else p.segments_of(new.kv_segments),
            new.top,
        )


# ---- registration of a server that serves


@dataclass(frozen=True, slots=True)
class StopServing:
    """Request to end the process."""


Changes = queue.SimpleQueue[Change | StopServing]


def keep_registered(ctx: WorkerContext, url: str, changes: Changes, copies: str = "") -> None:
    """Keep the registration true until StopServing. Raises GenerationError if the engine will not serve again."""
    key = ctx.names.generation_server(ctx.index)
    while not isinstance(change := changes.get(), StopServing):
        if change.final:
            raise GenerationError(f"{ctx.name}: {change.reason}")
        if change.serial is None:
            log.warning("not serving: %s", change.reason)
            ctx.check_alive()  # without the lease this could be the registration of a successor
            ctx.store.clear_subtree(key)  # no error if the key is not there
            ctx.set_state("restarting")
            continue
        incarnation = f"{ctx.incarnation}.{change.serial}" if change.serial else ctx.incarnation
        address = ServerAddress(ctx.name, url, os.getpid(), socket.gethostname(), incarnation, copies)
        ctx.register(key, msgspec.json.encode(address).decode())
        ctx.set_state("serving")


def stop_serving(engine: GenerationEngine, http: HttpServer) -> None:
    """Return what the open completions have so far, so that other servers continue them; then close both."""
    with contextlib.suppress(GenerationError, TimeoutError):  # the engine has ended already, or hangs
        engine.pause("abort").result(_HAND_OVER_S)
    # The engine first: new calls then fail immediately, and the HTTP server has no replies to wait for.
    engine.close()
    http.close()
