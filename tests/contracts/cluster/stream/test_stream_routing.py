"""Calls by handle."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from realsys.cluster.stream.master_stream import MasterStream, RoutedStream
from realsys.cluster.stream.worker_endpoint import WorkerEndpoint
from realsys.cluster.topology import routing_table, whole_mesh
from realsys.config.allocation import ParallelLayout
from realsys.errors import RemoteError, StreamError, WaitTimeout, WorkerLost
from realsys.model_calls import Empty
from tests.support.streams.stream_parts import BOUND_S

LAYOUT = ParallelLayout(data=2, pipeline=2, tensor=2)


class Who(msgspec.Struct):
    index: int


async def routed_mesh(stream: MasterStream) -> tuple[RoutedStream, list[WorkerEndpoint]]:
    endpoints = [WorkerEndpoint(i, stream.address) for i in range(LAYOUT.world_size)]
    await stream.barrier(range(LAYOUT.world_size), BOUND_S)
    return RoutedStream(stream, routing_table({"actor": whole_mesh(LAYOUT)})), endpoints


async def answer(endpoint: WorkerEndpoint, count: int = 1) -> list[str]:
    def serve() -> list[str]:
        handlers = []
        for _ in range(count):
            request = endpoint.next_request(BOUND_S)
            assert request is not None
            handlers.append(request.handler)
            endpoint.reply(request, Who(endpoint.index))
        return handlers

    return await asyncio.to_thread(serve)


async def close(stream: MasterStream, endpoints: list[WorkerEndpoint]) -> None:
    for endpoint in endpoints:
        await asyncio.to_thread(endpoint.close)
    stream.close()


def test_handles_lead_to_their_workers() -> None:
    async def run() -> None:
        stream = MasterStream()
        routed, endpoints = await routed_mesh(stream)
        for handle, worker in (
            ("__data0__", 4),
            ("__data1__", 6),
            ("actor/__data1__", 6),
            ("actor@d1t1p0", 3),
            ("5", 5),
            (7, 7),
        ):
            call = routed.request(handle, "who", Empty(), Who)
            await answer(endpoints[worker])
            assert (await asyncio.wait_for(call, BOUND_S)).index == worker
        with pytest.raises(StreamError, match="no worker for handle='critic@d0t0p0': use one of .*table: 0, 1, "):
            routed.worker("critic@d0t0p0")
        await close(stream, endpoints)

    asyncio.run(run())


def test_broadcast_reaches_each_worker_once_in_order() -> None:
    """The replies come back in the order of the workers."""

    async def run() -> None:
        stream = MasterStream()
        routed, endpoints = await routed_mesh(stream)
        handles = ["__data1__", 3, "actor@d0t0p0", "6"]  # __data1__ and 6 are one worker
        replies, *_ = await asyncio.gather(
            routed.broadcast(handles, "who", Empty(), Who), *(answer(endpoints[worker]) for worker in (6, 3, 0))
        )
        assert [reply.index for reply in replies] == [6, 3, 0]
        await close(stream, endpoints)

    asyncio.run(run())


def test_concurrent_broadcasts_reach_every_worker_in_one_order() -> None:
    async def run() -> None:
        stream = MasterStream()
        routed, endpoints = await routed_mesh(stream)
        everyone = range(LAYOUT.world_size)
        orders = [everyone, reversed(everyone), [3, 1, *everyone]]
        calls = [routed.broadcast(order, f"call{i}", Empty(), Who) for i, order in enumerate(orders)]
        _, handled = await asyncio.gather(
            asyncio.gather(*calls), asyncio.gather(*(answer(endpoint, 3) for endpoint in endpoints))
        )
        assert handled == [handled[0]] * LAYOUT.world_size
        await close(stream, endpoints)

    asyncio.run(run())


def test_broadcast_raises_first_failure_though_others_hang() -> None:
    async def run() -> None:
        stream = MasterStream()
        routed, endpoints = await routed_mesh(stream)
        call = asyncio.ensure_future(routed.broadcast([0, 1, 2], "mfc", Empty(), Empty))
        request = await asyncio.to_thread(endpoints[1].next_request, BOUND_S)
        assert request is not None
        endpoints[1].reply_error(request, ValueError("no such interface"))
        with pytest.raises(RemoteError, match="model_worker/1: mfc: ValueError: no such interface"):
            await asyncio.wait_for(call, BOUND_S)
        await close(stream, endpoints)

    asyncio.run(run())


def test_call_to_missing_worker_reaches_no_worker() -> None:
    """The ranks that got it would wait for the missing one in a collective."""

    async def run() -> None:
        stream = MasterStream()
        routed, endpoints = await routed_mesh(stream)
        stream.lose(2, "its lease lapsed")
        with pytest.raises(WorkerLost, match="model_worker/2 is not connected: mfc needs a barrier"):
            await routed.broadcast([0, 1, 2], "mfc", Empty(), Empty)
        _, handled = await asyncio.gather(routed.request(1, "later", Empty(), Who), answer(endpoints[1]))
        assert handled == ["later"]
        await close(stream, endpoints)

    asyncio.run(run())


def test_timeout_names_the_workers_without_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is over when the test says so: after the one reply has arrived."""

    async def run() -> None:
        stream = MasterStream()
        routed, endpoints = await routed_mesh(stream)
        loop, expire = asyncio.get_running_loop(), list[Callable[[], None]]()
        call_later = loop.call_later

        def noted(delay: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
            if delay == BOUND_S:
                expire.append(functools.partial(callback, *args))
            return call_later(delay, callback, *args)

        monkeypatch.setattr(loop, "call_later", noted)
        call = routed.broadcast([0, 1, 2], "mfc", Empty(), Who, timeout_s=BOUND_S)
        await answer(endpoints[1])
        await asyncio.gather(routed.request(1, "later", Empty(), Who), answer(endpoints[1]))  # behind the reply
        [end] = expire
        end()
        with pytest.raises(WaitTimeout, match="model_worker/0, model_worker/2: no reply to mfc in 60 s"):
            await call
        await close(stream, endpoints)

    asyncio.run(run())


def test_call_has_one_timer_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        stream = MasterStream()
        routed, endpoints = await routed_mesh(stream)
        loop, delays = asyncio.get_running_loop(), []
        call_later = loop.call_later

        def counted(delay: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
            delays.append(delay)
            return call_later(delay, *args, **kwargs)

        monkeypatch.setattr(loop, "call_later", counted)
        everyone = range(LAYOUT.world_size)
        await asyncio.gather(
            routed.broadcast(everyone, "who", Empty(), Who, timeout_s=BOUND_S), *map(answer, endpoints)
        )
        assert delays.count(BOUND_S) == 1
        await close(stream, endpoints)

    asyncio.run(run())
