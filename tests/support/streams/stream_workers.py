"""Workers of a master stream for tests: they answer, fail or hold, in threads of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from realsys.cluster.stream.master_stream import MasterStream
from realsys.cluster.stream.worker_endpoint import WorkerEndpoint, WorkerRequest
from realsys.errors import DecodeError, StreamError
from tests.support.streams.stream_parts import BOUND_S


class Number(msgspec.Struct):
    value: int


class Answering:
    """A worker that answers: ``echo`` gives the number back, ``fail`` raises, ``hold`` waits for ``gate``."""

    def __init__(self, index: int, address: str, **options: Any) -> None:
        self.endpoint = WorkerEndpoint(index, address, **options)
        self.handled: list[tuple[str, int]] = []
        self.holding, self.gate = threading.Event(), threading.Event()
        self.ended: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.gate.set()
        self.endpoint.close()
        self.wait_ended()

    def wait_ended(self) -> None:
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            while (request := self.endpoint.next_request(BOUND_S)) is not None:
                self._answer(request)
        except StreamError as exc:
            self.ended = exc

    def _answer(self, request: WorkerRequest) -> None:
        try:
            payload = request.decode(Number)
            self.handled.append((request.handler, payload.value))
            if request.handler == "fail":
                raise ValueError(f"cannot do {payload.value}")
            if request.handler == "hold":
                self.holding.set()
                assert self.gate.wait(BOUND_S)
            self.endpoint.reply(request, payload)
        except (ValueError, DecodeError) as exc:
            self.endpoint.reply_error(request, exc)


def with_workers(body: Callable[[MasterStream, list[Answering]], Awaitable[None]], count: int = 1) -> None:
    async def run() -> None:
        stream = MasterStream()
        workers = [Answering(i, stream.address) for i in range(count)]
        try:
            async with asyncio.timeout(BOUND_S):
                await stream.barrier(range(count), BOUND_S)
                await body(stream, workers)
        finally:
            for worker in workers:
                await asyncio.to_thread(worker.close)
            stream.close()

    asyncio.run(run())


async def happens(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, BOUND_S)
