"""HTTP surface: an error after the first line of progress still has its status and its message."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest

from realsys.cluster.http_server import HttpServer
from realsys.errors import GenerationError, ServerBusy, ServerFailed
from realsys.generation.backend import RequestSnapshot
from realsys.generation.client import GenerationClient, Received, SamplingSpec
from realsys.generation.completion import Completion
from realsys.generation.protocol import ServerInfo
from realsys.generation.server import build_app

TWO = Completion.of([5, 6], [-0.5, -1], [(3, 2)])


class FailsLater:
    """An engine whose request fails after its tokens were looked at."""

    def __init__(self, error: GenerationError) -> None:
        self._error = error
        self._done: Future[list[Completion]] = Future()

    def generate(self, rid, input_ids, params, *, stream=False):
        return self._done

    def snapshot(self, rid):
        self._done.set_exception(self._error)
        looked: Future[RequestSnapshot | None] = Future()
        looked.set_result(RequestSnapshot([TWO], frozenset({0}), 0))
        return looked


class Measured:
    """An engine that has started processes. It returns the same object each time, as an engine of a user may."""

    def __init__(self, memory_bytes):
        self._info = ServerInfo("mine", "0", 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, False, 0.0, memory_bytes=memory_bytes)

    def info(self):
        return self._info


def test_memory_is_of_the_process_and_its_own():
    async def ask(url):
        client = GenerationClient(30.0)
        try:
            return [(await client.server_info(url)).memory_bytes for _ in range(2)]
        finally:
            await client.close()

    http = HttpServer(build_app(Measured(1 << 40)))
    http.start()
    try:
        sizes = asyncio.run(ask(http.url))
    finally:
        http.stop()
    assert all((1 << 40) + (1 << 20) < size < (1 << 40) + (1 << 36) for size in sizes)


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (GenerationError("not finite"), GenerationError, 400),
        (GenerationError("it stops", retryable=True), ServerFailed, 503),
        (ServerBusy("queue full"), ServerBusy, 429),
    ],
)
def test_error_after_progress_keeps_its_kind(error, kind, status):
    async def ask(url):
        client, received = GenerationClient(30.0, progress_s=0.01), Received(1)
        try:
            with pytest.raises(GenerationError, match=f"status {status}: {error}") as caught:
                await client.generate(url, [1], SamplingSpec(), rid="a", seed=1, received=received)
        finally:
            await client.close()
        assert type(caught.value) is kind
        assert received.completions[0].tokens.tolist() == [5, 6]

    http = HttpServer(build_app(FailsLater(error)))
    http.start()
    try:
        asyncio.run(ask(http.url))
    finally:
        http.close()
