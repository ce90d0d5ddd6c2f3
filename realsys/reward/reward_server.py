"""HTTP surface of a VerifierPool (``verifier_protocol.py``). A request is held until all of its items are decided.

POST /verify ──> room? ──> a task for each item in the pool ──> lines with outcomes ──> the rest
                                  ^
          caller closes the connection: the tasks are cancelled, and the pool drops what no process has begun
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from realsys.cluster.failpoint import failpoint
from realsys.cluster.http_server import Admission, Guard, RefusedRequest
from realsys.cluster.lease import CheckAlive, unleased
from realsys.errors import MALFORMED, NoVerifierError, RewardError
from realsys.observe.rate import RateWindow
from realsys.reward import verifier_protocol as p
from realsys.reward.pool import OVER_LIMIT, VerifierPool
from realsys.reward.verifier_protocol import NoVerdict, VerifierWork
from realsys.reward.verifiers.contract import Verdict

_REQUEST: msgspec.json.Decoder[p.VerifyRequest] = msgspec.json.Decoder(p.VerifyRequest)


class RewardServer:
    """The routes to a pool with ``judgements=1``. ``app`` is the ASGI application."""

    def __init__(
        self, pool: VerifierPool, max_items: int, *, token: str | None = None, check_alive: CheckAlive = unleased
    ) -> None:
        """``token`` is what every POST must carry; None only for a service on loopback without a trial."""
        self._pool = pool
        self._room = RequestRoom(max_items, time.monotonic)
        routes = [
            Route("/verify", self._verify, methods=["POST"]),
            Route("/info", self._info),
            Route("/metrics", self._metrics),
        ]
        self.app = Guard(
            Starlette(routes=routes),
            Admission(token, check_alive=check_alive),
            max_body=p.MAX_BODY,
            error=_error,
            room=self._room.body,
        )

    @property
    def refused(self) -> Counter[str]:
        """Requests that were refused, by cause."""
        return self.app.refused + Counter(load=self._room.refused)

    def info(self) -> p.ServiceInfo:
        """Return the state of the service."""
        room, pool = self._room, self._pool
        return p.ServiceInfo(
            held=room.items,
            held_bytes=room.bytes,
            waiting=pool.waiting,
            verdicts=room.decided.total,
            verdicts_per_s=room.rate(),
            undecided=pool.undecided,
            restarts=pool.restarts,
            failures=dict(pool.failures),
            refused=dict(self.refused),
        )

    async def _verify(self, request: Request) -> Response:
        try:
            body = _REQUEST.decode(await request.body())
        except MALFORMED as error:
            return _json(_error(f"/verify: {error}"), 400)
        try:
            self._room.enter(len(body.items))
        except RefusedRequest as full:
            return _json(_error(full.message), full.status, {"Retry-After": f"{full.retry_after_s:.0f}"})
        failpoint("reward.judge")
        batch = _Batch(self._pool, self._room, body)
        client_left = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((batch.done, client_left), timeout=p.PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
            if client_left.done() or batch.done.done():
                return _json(batch.take())
        except BaseException:
            batch.cancel()
            raise
        finally:
            if client_left.done():
                batch.cancel()
            client_left.cancel()
        return StreamingResponse(batch.lines(), media_type="application/json")

    async def _info(self, request: Request) -> Response:
        return _json(self.info())

    async def _metrics(self, request: Request) -> Response:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_InfoCollector(self.info()))
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})


class _Batch:
    """The items of one request while they are judged."""

    def __init__(self, pool: VerifierPool, room: RequestRoom, request: p.VerifyRequest) -> None:
        self._pool = pool
        self._decided: list[p.Decided] = []
        work = VerifierWork(request.name, request.check)
        self._room = room
        self._tasks = {
            asyncio.create_task(self._judge(index, work, bytes(item))) for index, item in enumerate(request.items)
        }
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for task in self._tasks:
            task.add_done_callback(self._ended)
        if not self._tasks:
            self.done.set_result(None)

    def take(self) -> p.VerifyReply:
        """Return the outcomes since the last call."""
        decided, self._decided = self._decided, []
        return p.VerifyReply(decided)

    def cancel(self) -> None:
        """Give up the items that are not decided."""
        for task in self._tasks:
            task.cancel()

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield a line every PROGRESS_S, then the rest."""
        try:
            while not self.done.done():
                yield msgspec.json.encode(self.take()) + b"\n"
                await asyncio.wait((self.done,), timeout=p.PROGRESS_S)
            yield msgspec.json.encode(self.take())
        finally:
            self.cancel()  # the caller closed the connection, unless all are decided

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._room.leave(decided=not task.cancelled())
        self._tasks.discard(task)
        if not self._tasks:
            self.done.set_result(None)

    async def _judge(self, index: int, work: VerifierWork, item: bytes) -> None:
        outcome: Verdict | NoVerdict | p.NoVerifier
        try:
            outcome = await self._pool.judge(work, item)
        except RewardError as error:
            outcome = NoVerdict(error.cause, str(error))
        except NoVerifierError as error:
            outcome = p.NoVerifier(str(error))
        self._decided.append(p.Decided(index, outcome, outcome is OVER_LIMIT))


class _InfoCollector(Collector):
    """One scrape of a service."""

    def __init__(self, info: p.ServiceInfo) -> None:
        self._info = info

    def collect(self) -> Iterator[Metric]:
        info = self._info
        for name, text, value in (
            ("held", "completions that wait or are judged", info.held),
            ("held_bytes", "bytes of the requests that are held", info.held_bytes),
            ("waiting", "completions that no verifier process has taken", info.waiting),
            ("verdicts_per_second", "completions decided per second, last 30 s", info.verdicts_per_s),
        ):
            yield GaugeMetricFamily(f"realsys_reward_{name}", text, value)
        for name, text, count in (
            ("verdicts", "completions decided", info.verdicts),
            ("undecided", "judgements without a verdict", info.undecided),
            ("process_restarts", "verifier processes that were replaced", info.restarts),
        ):
            yield CounterMetricFamily(f"realsys_reward_{name}", text, count)
        for name, text, causes in (
            ("failures", "judgements that failed or exceeded a limit", info.failures),
            ("refused", "requests refused", info.refused),
        ):
            family = CounterMetricFamily(f"realsys_reward_{name}", text, labels=["cause"])
            for cause, count in causes.items():
                family.add_metric([cause], count)
            yield family


async def _disconnected(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(message: str) -> dict[str, str]:
    return {"error": message}


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


# ---- room: a bound on the items that a service holds and on the bytes of their requests. Pure
#
#     request ──bytes──> full? ── no ──> items ──> full? ── no ──> held until decided or until the caller has left
#                          └── yes ─────────────────┴── yes ──> 503 with Retry-After
#
# bounded-room   it holds at most ``max_items`` and ``max_bytes``, or one request that is larger than that


MOST_ITEMS = 4096  # completions that a service holds; when it is full, RolloutWorkers send them later
MAX_BYTES = 512 << 20  # bytes of the requests that a service holds
_FIRST_S, _LAST_S = 1, 10  # bounds on the wait that a full service asks for


class RequestRoom:
    """Items and bytes that a service holds, and its rate of decisions. ``clock`` returns seconds."""

    def __init__(self, max_items: int, clock: Callable[[], float], max_bytes: int = MAX_BYTES) -> None:
        self.items = 0
        self.bytes = 0
        self.refused = 0  # requests
        self.decided = RateWindow()
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._clock = clock

    @contextlib.contextmanager
    def body(self, size: int) -> Iterator[None]:
        """Hold the ``size`` bytes of a request. Raises Refused."""
        if self.bytes and self.bytes + size > self._max_bytes:
            raise self._full(f"{self.bytes} bytes of requests are held, at most {self._max_bytes}", self.items)
        self.bytes += size
        try:
            yield
        finally:
            self.bytes -= size

    def enter(self, count: int) -> None:
        """Hold ``count`` more items; each must ``leave``. Raises Refused."""
        if self.items and self.items + count > self._max_items:
            excess = self.items + count - self._max_items
            raise self._full(f"{self.items} completions are held, at most {self._max_items}", excess)
        self.items += count

    def leave(self, decided: bool) -> None:
        """Let one item go. ``decided``: it was not given up by its caller."""
        self.items -= 1
        if decided:
            self.decided.add(1, self._clock())

    def rate(self) -> float:
        """Return items decided per second."""
        return self.decided.rate(self._clock())

    def _full(self, problem: str, excess: int) -> RefusedRequest:
        """Return the refusal, with the time in which ``excess`` items are decided."""
        self.refused += 1
        rate = self.rate()
        wait_s = min(_LAST_S, max(_FIRST_S, math.ceil(excess / rate))) if rate else _LAST_S
        return RefusedRequest(503, f"the reward service is full: {problem}", retry_after_s=wait_s)
