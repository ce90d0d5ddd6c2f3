"""Request-reply: order, errors by name, and what happens when workers go and come back."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from realsys.errors import DecodeError, Fenced, RemoteError, StreamError, WaitTimeout, WorkerLost
from realsys.stream.codec import encode_message
from realsys.stream.protocol import Ack, Hello, NoticeHeader, ReplyHeader, RequestHeader, Welcome
from realsys.stream.push_pull import Puller, Pusher
from realsys.stream.request_reply import MasterStream, Request, WorkerEndpoint
from realsys.types import ClearRequest, SampleMeta, SamplesArrived, TrajectoryGroup
from tests.stream_parts import BOUND_S, CuttableProxy, make_group


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
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            while (request := self.endpoint.next_request(BOUND_S)) is not None:
                self._answer(request)
        except StreamError as exc:
            self.ended = exc

    def _answer(self, request: Request) -> None:
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


def test_requests_reach_each_worker_in_the_order_they_were_made() -> None:
    async def body(stream: MasterStream, workers: list[Answering]) -> None:
        replies = [stream.request(w, "echo", Number(i), Number) for i in range(50) for w in range(2)]
        values = [reply.value for reply in await asyncio.gather(*replies)]
        assert values == [i for i in range(50) for _ in range(2)]
        for worker in workers:
            assert worker.handled == [("echo", i) for i in range(50)]

    with_workers(body, 2)


def test_a_slow_worker_does_not_hold_up_another() -> None:
    async def body(stream: MasterStream, workers: list[Answering]) -> None:
        slow = stream.request(0, "hold", Number(1), Number)
        assert (await stream.request(1, "echo", Number(2), Number)).value == 2
        assert not slow.done()
        workers[0].gate.set()
        assert (await slow).value == 1

    with_workers(body, 2)


def test_an_error_in_a_handler_carries_its_traceback() -> None:
    async def body(stream: MasterStream, workers: list[Answering]) -> None:
        with pytest.raises(RemoteError, match="model_worker/0: fail: ValueError: cannot do 7") as caught:
            await stream.request(0, "fail", Number(7), Number)
        assert "in _answer" in caught.value.remote_traceback
        assert (await stream.request(0, "echo", Number(8), Number)).value == 8

    with_workers(body)


def test_a_payload_of_the_wrong_type_is_an_error_on_the_side_that_notices() -> None:
    async def body(stream: MasterStream, workers: list[Answering]) -> None:
        with pytest.raises(RemoteError, match="request 1 for handler echo: not a Number"):
            await stream.request(0, "echo", ClearRequest(["a"]), Number)
        with pytest.raises(DecodeError, match="model_worker/0: reply to echo: not a ClearRequest"):
            await stream.request(0, "echo", Number(1), ClearRequest)

    with_workers(body)


def test_a_barrier_names_the_workers_that_are_missing() -> None:
    async def run() -> None:
        stream = MasterStream()
        worker = Answering(1, stream.address)
        await stream.barrier([1], BOUND_S)
        with pytest.raises(
            WaitTimeout, match=r"model_worker/0, model_worker/2 did not connect in 0.1 s \(1 connected\)"
        ):
            await stream.barrier([0, 1, 2], 0.1)
        assert stream.connected == [1]
        await asyncio.to_thread(worker.close)
        stream.close()

    asyncio.run(run())


def test_a_request_before_the_barrier_says_so() -> None:
    async def run() -> None:
        stream = MasterStream()
        with pytest.raises(WorkerLost, match="model_worker/0 is not connected: echo needs a barrier"):
            await stream.request(0, "echo", Number(1), Number)
        stream.close()

    asyncio.run(run())


def test_a_timeout_names_worker_and_handler_and_a_late_reply_is_ignored() -> None:
    async def body(stream: MasterStream, workers: list[Answering]) -> None:
        with pytest.raises(WaitTimeout, match="model_worker/0: no reply to hold in 0.1 s"):
            await stream.request(0, "hold", Number(1), Number, timeout_s=0.1)
        workers[0].gate.set()
        assert (await stream.request(0, "echo", Number(2), Number)).value == 2

    with_workers(body)


def test_a_new_incarnation_fails_the_calls_of_the_old_and_takes_over() -> None:
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


def test_an_older_incarnation_that_comes_later_does_not_take_over() -> None:
    async def run() -> None:
        with thread_errors() as errors:
            stream = MasterStream()
            new = Answering(0, stream.address, incarnation="2")
            await stream.barrier([0], BOUND_S)
            old = Answering(0, stream.address, incarnation="1")
            await asyncio.to_thread(old._thread.join, BOUND_S)
            assert isinstance(old.ended, StreamError)
            assert (await stream.request(0, "echo", Number(5), Number)).value == 5
            assert (old.handled, new.handled) == ([], [("echo", 5)])
            for worker in (old, new):
                await asyncio.to_thread(worker.close)
            stream.close()
        assert [type(error) for error in errors] == [Fenced]
        assert "refused incarnation 1: it was retired; current incarnation: 2" in str(errors[0])

    asyncio.run(run())


def test_notices_that_nobody_asks_for_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realsys.stream.master_stream.MAX_UNCLAIMED", 3)

    async def body(stream: MasterStream, workers: list[Answering]) -> None:
        for number in range(4):
            workers[0].endpoint.notify("unheard", Number(number))
        with pytest.raises(StreamError, match="3 notices, and nobody asked for unheard"):
            await asyncio.wait_for(stream.request(0, "hold", Number(1), Number), BOUND_S)
        workers[0].gate.set()

    with_workers(body)


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


def test_a_request_lost_with_its_connection_comes_again_before_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind it lie in the worker's queue already; to take them would say that the lost one had come, too."""
    reached = 0

    def drop_the_fifth(point: str) -> str:
        nonlocal reached
        reached += point == "request.receive"
        return "drop" if point == "request.receive" and reached == 5 else ""

    monkeypatch.setattr("realsys.stream.endpoint.reach", drop_the_fifth)

    async def body(stream: MasterStream, workers: list[Answering]) -> None:
        replies = [stream.request(0, "echo", Number(value), Number) for value in range(200)]
        assert [reply.value for reply in await asyncio.gather(*replies)] == list(range(200))
        assert workers[0].handled == [("echo", value) for value in range(200)]

    with_workers(body)


def test_a_request_sent_twice_is_handled_once() -> None:
    """A master by hand."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    endpoint = WorkerEndpoint(0, address, incarnation="1")
    try:
        assert router.poll(BOUND_S * 1000)
        route, hello = router.recv_multipart()
        assert msgspec.msgpack.decode(hello, type=Hello) == Hello(0, "1", 0)
        for frames in (
            [encode_message(Welcome(0))],
            [encode_message(RequestHeader(1, "first")), b""],
            [b"garbage"],
            [encode_message(RequestHeader(1, "again")), b""],
            [encode_message(RequestHeader(2, "second"))],  # without its payload
            [encode_message(RequestHeader(3, "third")), b""],
        ):
            router.send_multipart([route, *frames])
        requests = [endpoint.next_request(BOUND_S) for _ in range(2)]
        assert [request.handler for request in requests if request] == ["first", "third"]
        assert endpoint.bad_messages == 2
    finally:
        endpoint.close()
        context.destroy(linger=0)


def test_a_notice_and_a_reply_sent_twice_are_taken_once() -> None:
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
        assert (await receive())[0] == encode_message(RequestHeader(1, "echo"))
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


def test_groups_pushed_to_a_worker_are_announced_to_the_master() -> None:
    async def run() -> None:
        stream = MasterStream()
        stored: list[str] = []

        def store(group: TrajectoryGroup) -> SamplesArrived:
            stored.append(group.ticket.ticket_id)
            metas = [
                SampleMeta(f"{group.ticket.ticket_id}/{k}", group.ticket.ticket_id, 0, 40, 10, 0.0, False, 3, 4, 2)
                for k in range(len(group.trajectories))
            ]
            return SamplesArrived(metas)

        puller = Puller()
        worker = Answering(2, stream.address, puller=puller, on_group=store)
        pusher = Pusher(lambda dp: puller.address, [0], "rollout_worker/0")
        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(*(pusher.push(make_group(f"t{i}")) for i in range(10)))
            assert sorted(stored) == sorted(f"t{i}" for i in range(10))  # acknowledged means stored
            samples: asyncio.Queue[str] = asyncio.Queue()
            stream.on_notice(  # later than the notices: they wait for it
                "samples_arrived", SamplesArrived, lambda n: [samples.put_nowait(s.sample_id) for s in n.samples]
            )
            seen = {await samples.get() for _ in range(20)}
        assert seen == {f"t{i}/{k}" for i in range(10) for k in range(2)}
        await pusher.close()
        await asyncio.to_thread(worker.close)
        stream.close()

    asyncio.run(run())


def test_an_exception_while_storing_a_group_ends_the_io_thread_loudly() -> None:
    async def run() -> None:
        stream = MasterStream()
        puller = Puller()

        def store(group: TrajectoryGroup) -> None:
            raise ZeroDivisionError("a defect")

        worker = Answering(0, stream.address, puller=puller, on_group=store)
        pusher = Pusher(lambda dp: puller.address, [0], "rollout_worker/0", push_timeout_s=0.5)
        with pytest.raises(WaitTimeout):
            await pusher.push(make_group("t0"))
        await pusher.close()
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


def test_an_exception_in_a_notice_callback_fails_pending_and_later_requests() -> None:
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


def test_a_notice_that_cannot_be_decoded_fails_the_stream_loudly() -> None:
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


def test_garbage_at_the_master_is_counted_logged_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def body(stream: MasterStream, workers: list[Answering]) -> None:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(stream.address)
        for frames in ([b""], [b"\xff" * 50], [b"a", b"b", b"c", b"d"], [b"\x93\xa9request/1\x01\xa4echo", b""]):
            dealer.send_multipart(frames)
        worker = Answering(1, stream.address)  # connects after the garbage was sent, says hello after it arrived
        await stream.barrier([1], BOUND_S)
        while stream.bad_messages < 4:
            await asyncio.wait_for(stream.request(0, "echo", Number(1), Number), BOUND_S)
        await asyncio.to_thread(worker.close)
        context.destroy(linger=0)
        assert stream.connected == [0, 1]

    with caplog.at_level(logging.WARNING, "realsys.stream"):
        with_workers(body)
    assert "master: dropped message 1 from 127.0.0.1 (route " in caplog.text


def test_closing_an_endpoint_waits_for_its_last_reply_to_arrive() -> None:
    async def run() -> None:
        stream = MasterStream()
        endpoint = WorkerEndpoint(0, stream.address)
        await stream.barrier([0], BOUND_S)
        call = stream.request(0, "echo", Number(1), Number)

        def answer_and_close() -> None:
            request = endpoint.next_request(BOUND_S)
            assert request is not None
            endpoint.reply(request, Number(2))
            endpoint.close()

        await asyncio.gather(asyncio.to_thread(answer_and_close), asyncio.wait_for(call, BOUND_S))
        assert call.result().value == 2
        stream.close()

    asyncio.run(run())


def test_an_endpoint_without_a_master_says_where_it_looked_and_closes_in_time() -> None:
    endpoint = WorkerEndpoint(3, "tcp://127.0.0.1:9")
    with pytest.raises(WaitTimeout, match=r"model_worker/3: no welcome from the master at tcp://127.0.0.1:9 in 0.1 s"):
        endpoint.wait_connected(0.1)
    assert endpoint.next_request(0.01) is None
    endpoint.notify("count", Number(1))
    start = time.monotonic()
    endpoint.close(timeout_s=0.1)
    assert time.monotonic() - start < 5


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(StreamError, match="cannot connect to address='nowhere'"):
        WorkerEndpoint(0, "nowhere")
