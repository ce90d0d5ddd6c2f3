"""Request-reply when something is lost, cut, comes twice or breaks: workers that go and come back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from realsys.cluster.stream.codec import Ack, Hello, NoticeHeader, ReplyHeader, RequestHeader, Welcome, encode_message
from realsys.cluster.stream.master_stream import MasterStream
from realsys.cluster.stream.push_pull import Puller, Pusher
from realsys.cluster.stream.worker_endpoint import GroupIntake, WorkerEndpoint
from realsys.errors import Fenced, StreamError, WorkerLost
from realsys.model_calls import SamplesArrived
from realsys.types import Group
from tests.support.streams.stream_parts import BOUND_S, CuttableProxy, make_group, router_by_hand
from tests.support.streams.stream_workers import Answering, Number, happens, with_workers


@contextmanager
def thread_errors() -> Iterator[list[BaseException]]:
    """Errors that ended a thread, as a worker's excepthook sees them."""
    seen: list[BaseException] = []
    previous = threading.excepthook

    def note(args: threading.ExceptHookArgs) -> None:
        assert args.exc_value is not None
        seen.append(args.exc_value)

    threading.excepthook = note
    try:
        yield seen
    finally:
        threading.excepthook = previous


def test_new_incarnation_fails_old_calls_and_takes_over() -> None:
    async def run() -> None:
        with thread_errors() as errors:
            stream = MasterStream()
            old = Answering(0, stream.address, incarnation="1")
            await stream.barrier([0], BOUND_S)
            pending = stream.request(0, "hold", Number(1), Number)
            await happens(old.holding)
            new = Answering(0, stream.address, incarnation="2")
            with pytest.raises(WorkerLost, match="model_worker/0 lost during hold: incarnation 1 was replaced by 2"):
                await asyncio.wait_for(pending, BOUND_S)
            assert (await stream.request(0, "echo", Number(5), Number)).value == 5
            assert new.handled == [("echo", 5)]
            await asyncio.to_thread(old.close)  # told to stop, it has ended by itself
            assert isinstance(old.ended, StreamError)
            await asyncio.to_thread(new.close)
            stream.close()
        assert [type(error) for error in errors] == [Fenced]
        assert "model_worker/0: the master refused incarnation 1: replaced by 2" in str(errors[0])

    asyncio.run(run())


def test_older_incarnation_does_not_take_over() -> None:
    async def run() -> None:
        with thread_errors() as errors:
            stream = MasterStream()
            new = Answering(0, stream.address, incarnation="2")
            await stream.barrier([0], BOUND_S)
            old = Answering(0, stream.address, incarnation="1")
            await asyncio.to_thread(old.wait_ended)
            assert isinstance(old.ended, StreamError)
            assert (await stream.request(0, "echo", Number(5), Number)).value == 5
            assert (old.handled, new.handled) == ([], [("echo", 5)])
            for worker in (old, new):
                await asyncio.to_thread(worker.close)
            stream.close()
        assert [type(error) for error in errors] == [Fenced]
        assert "refused incarnation 1: it was retired; current incarnation: 2" in str(errors[0])

    asyncio.run(run())


def test_number_of_workers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The master remembers each of them. One that it knows may still come back."""
    monkeypatch.setattr("realsys.cluster.stream.master_stream.MAX_PEERS", 1)

    async def run() -> None:
        with thread_errors() as errors:
            stream = MasterStream()
            first = Answering(1 << 40, stream.address, incarnation="1")
            await stream.barrier([1 << 40], BOUND_S)
            other = Answering(7, stream.address, incarnation="1")
            await asyncio.to_thread(other.wait_ended)
            again = Answering(1 << 40, stream.address, incarnation="2")
            await asyncio.to_thread(first.wait_ended)
            assert (await stream.request(1 << 40, "echo", Number(5), Number)).value == 5
            for worker in (first, other, again):
                await asyncio.to_thread(worker.close)
            stream.close()
        assert "model_worker/7: the master refused incarnation 1: 1 workers have connected" in str(errors[0])

    asyncio.run(run())


def test_a_worker_declared_lost_fails_its_calls() -> None:
    async def body(stream: MasterStream, workers: list[Answering]) -> None:
        pending = stream.request(0, "hold", Number(1), Number)
        await happens(workers[0].holding)
        stream.lose(0, "its lease lapsed")
        with pytest.raises(WorkerLost, match="model_worker/0 lost during hold: its lease lapsed"):
            await pending
        with pytest.raises(WorkerLost, match="is not connected"):
            await stream.request(0, "echo", Number(1), Number)

    with_workers(body)


def test_a_cut_connection_loses_and_doubles_nothing() -> None:
    async def run() -> None:
        stream = MasterStream()
        proxy = CuttableProxy(stream.address)
        notices: list[int] = []
        complete = asyncio.Event()

        def note(notice: Number) -> None:
            notices.append(notice.value)
            if notice.value == 9:
                complete.set()

        stream.on_notice("count", Number, note)
        worker = Answering(0, proxy.address)
        async with asyncio.timeout(BOUND_S):
            await stream.barrier([0], BOUND_S)
            held = stream.request(0, "hold", Number(0), Number)
            queued = [stream.request(0, "echo", Number(i), Number) for i in range(1, 4)]
            await happens(worker.holding)
            for i in range(5):
                worker.endpoint.notify("count", Number(i))
            await asyncio.to_thread(proxy.cut)
            for i in range(5, 10):
                worker.endpoint.notify("count", Number(i))
            queued += [stream.request(0, "echo", Number(i), Number) for i in range(4, 6)]
            worker.gate.set()
            assert (await held).value == 0
            assert [reply.value for reply in await asyncio.gather(*queued)] == [1, 2, 3, 4, 5]
            await complete.wait()
        assert notices == list(range(10))
        assert worker.handled == [("hold", 0)] + [("echo", i) for i in range(1, 6)]
        assert proxy.accepted >= 2
        await asyncio.to_thread(worker.close)
        await asyncio.to_thread(proxy.close)
        stream.close()

    asyncio.run(run())


def test_lost_request_is_resent_before_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind it lie in the worker's queue already; to take them would say that the lost one had come, too."""
    reached = 0

    def drop_the_fifth(point: str) -> str:
        nonlocal reached
        reached += point == "request.receive"
        return "drop" if point == "request.receive" and reached == 5 else ""

    monkeypatch.setattr("realsys.cluster.stream.worker_endpoint.failpoint", drop_the_fifth)

    async def body(stream: MasterStream, workers: list[Answering]) -> None:
        replies = [stream.request(0, "echo", Number(value), Number) for value in range(200)]
        assert [reply.value for reply in await asyncio.gather(*replies)] == list(range(200))
        assert workers[0].handled == [("echo", value) for value in range(200)]

    with_workers(body)


@contextmanager
def worker_of_router() -> Iterator[tuple[WorkerEndpoint, zmq.Socket[bytes]]]:
    """Yield a worker, and a socket in place of its master."""
    with router_by_hand() as (router, address):
        endpoint = WorkerEndpoint(0, address, incarnation="1")
        try:
            yield endpoint, router
        finally:
            endpoint.close()


def test_a_request_sent_twice_is_handled_once() -> None:
    """A master by hand."""
    with worker_of_router() as (endpoint, router):
        assert router.poll(BOUND_S * 1000)
        route, hello = router.recv_multipart()
        assert msgspec.msgpack.decode(hello, type=Hello) == Hello(0, "1", 0)
        for frames in (
            [encode_message(Welcome(0))],
            [encode_message(RequestHeader(1, "first", 0)), b""],
            [b"garbage"],
            [encode_message(RequestHeader(1, "again", 0)), b""],
            [encode_message(RequestHeader(2, "second", 0))],  # without its payload
            [encode_message(RequestHeader(3, "third", 0)), b""],
        ):
            router.send_multipart([route, *frames])
        requests = [endpoint.next_request(BOUND_S) for _ in range(2)]
        assert [request.handler for request in requests if request] == ["first", "third"]
        assert endpoint.counters()["bad_messages"] == 2


def test_resent_notice_and_reply_are_taken_once() -> None:
    """A worker by hand."""

    async def run() -> None:
        stream = MasterStream()
        values: list[int] = []
        stream.on_notice("count", Number, lambda notice: values.append(notice.value))
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(stream.address)

        async def receive() -> list[bytes]:
            assert await asyncio.to_thread(dealer.poll, BOUND_S * 1000)
            return dealer.recv_multipart()

        dealer.send_multipart([encode_message(NoticeHeader(1, "count")), encode_message(Number(0))])  # before hello
        dealer.send(encode_message(Hello(0, "1", 0)))
        assert await receive() == [encode_message(Welcome(0))]
        call = stream.request(0, "echo", Number(1), Number)
        assert (await receive())[0] == encode_message(RequestHeader(1, "echo", 0))
        notice = [encode_message(NoticeHeader(1, "count")), encode_message(Number(1))]
        reply = [encode_message(ReplyHeader(2, 1, None)), encode_message(Number(5))]
        for message in (notice, notice, reply, reply):
            dealer.send_multipart(message)
        assert (await asyncio.wait_for(call, BOUND_S)).value == 5
        dealer.send_multipart([encode_message(NoticeHeader(3, "count")), encode_message(Number(3))])
        acknowledged = 0
        while acknowledged < 3:  # acknowledgements are gathered: there may be fewer than messages
            acknowledged = msgspec.msgpack.decode((await receive())[0], type=Ack).number
        assert values == [1, 3]
        context.destroy(linger=0)
        stream.close()

    asyncio.run(run())


def test_next_request_acknowledges_the_reply() -> None:
    """A worker by hand. An Ack to each of 512 workers would cost them a third of a call without content."""

    async def run() -> None:
        stream = MasterStream()
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(stream.address)

        async def receive() -> bytes:
            assert await asyncio.to_thread(dealer.poll, BOUND_S * 1000)
            return dealer.recv_multipart()[0]

        dealer.send(encode_message(Hello(0, "1", 0)))
        assert await receive() == encode_message(Welcome(0))
        call = stream.request(0, "echo", Number(1), Number)
        assert await receive() == encode_message(RequestHeader(1, "echo", 0))
        dealer.send_multipart([encode_message(ReplyHeader(7, 1, None)), encode_message(Number(5))])
        await asyncio.wait_for(call, BOUND_S)
        later = stream.request(0, "echo", Number(2), Number)
        assert await receive() == encode_message(RequestHeader(2, "echo", 7))
        later.cancel()
        context.destroy(linger=0)
        stream.close()

    asyncio.run(run())


def test_worker_takes_acknowledgement_from_request(caplog: pytest.LogCaptureFixture) -> None:
    """A master by hand, which sends no Ack."""
    with worker_of_router() as (endpoint, router):
        assert router.poll(BOUND_S * 1000)
        route, _ = router.recv_multipart()
        router.send_multipart([route, encode_message(Welcome(0))])
        for number, acknowledged in ((1, 0), (2, 1)):
            router.send_multipart([route, encode_message(RequestHeader(number, "echo", acknowledged)), b""])
            request = endpoint.next_request(BOUND_S)
            assert request is not None
            if number == 1:
                endpoint.reply(request, Number(1))
                assert router.poll(BOUND_S * 1000)
    assert "not acknowledged" not in caplog.text


def test_exception_in_group_store_ends_io_thread_loudly() -> None:
    async def run() -> None:
        stream = MasterStream()
        puller = Puller()

        def store(group: Group) -> None:
            raise ZeroDivisionError("a defect")

        worker = Answering(0, stream.address, groups=GroupIntake(puller, store))
        pusher = Pusher(lambda dp: puller.address, [0], "rollout_worker/0")
        push = asyncio.create_task(pusher.push(make_group("t0")))
        await asyncio.to_thread(worker.wait_ended)
        await pusher.close()
        with pytest.raises(StreamError, match="the pusher was closed"):
            await push
        await asyncio.to_thread(worker.close)
        assert isinstance(worker.ended, StreamError)
        assert "model_worker/0: no more requests: its I/O thread died: ZeroDivisionError('a defect')" in str(
            worker.ended
        )
        with pytest.raises(StreamError, match="cannot send"):
            worker.endpoint.notify("count", Number(1))
        stream.close()

    with thread_errors() as errors:
        asyncio.run(run())
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_exception_in_notice_callback_fails_all_requests() -> None:
    """Pending requests and later ones fail."""

    async def body(stream: MasterStream, workers: list[Answering]) -> None:
        def callback(notice: Number) -> None:
            raise ZeroDivisionError("a defect")

        stream.on_notice("count", Number, callback)
        pending = stream.request(0, "hold", Number(1), Number)
        await happens(workers[0].holding)
        workers[0].endpoint.notify("count", Number(1))
        for call in (pending, stream.request(0, "echo", Number(1), Number)):
            with pytest.raises(StreamError, match="the stream failed: ZeroDivisionError") as caught:
                await call
            assert isinstance(caught.value.__cause__, ZeroDivisionError)

    with_workers(body)


def test_undecodable_notice_fails_the_stream_loudly() -> None:
    """What it announced is on the worker and would never be heard of again."""

    async def body(stream: MasterStream, workers: list[Answering]) -> None:
        stream.on_notice("samples_arrived", SamplesArrived, lambda notice: None)
        held = stream.request(0, "hold", Number(1), Number)
        workers[0].endpoint.notify("samples_arrived", Number(7))
        with pytest.raises(StreamError, match="model_worker/0: notice samples_arrived"):
            await held

    with_workers(body)


def test_closing_the_master_fails_what_waits() -> None:
    async def body(stream: MasterStream, workers: list[Answering]) -> None:
        pending = stream.request(0, "hold", Number(1), Number)
        await happens(workers[0].holding)
        stream.close()
        for call in (pending, stream.request(0, "echo", Number(1), Number)):
            with pytest.raises(StreamError, match="model_worker/0: .*: the stream was closed"):
                await call

    with_workers(body)
