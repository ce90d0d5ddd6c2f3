"""Request-reply: order, errors by name, notices, and the end of either side."""

from __future__ import annotations

import asyncio
import logging

import pytest
import zmq

from realsys.cluster.stream.master_stream import MasterStream
from realsys.cluster.stream.push_pull import Puller, Pusher
from realsys.cluster.stream.worker_endpoint import GroupIntake, WorkerEndpoint
from realsys.errors import DecodeError, RemoteError, StreamError, WaitTimeout, WorkerLost
from realsys.model_calls import ClearRequest, SamplesArrived
from realsys.types import Group, SampleMeta
from tests.support.streams.stream_parts import BOUND_S, make_group
from tests.support.streams.stream_workers import Answering, Number, with_workers


def test_requests_reach_each_worker_in_order() -> None:
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


def test_wrong_payload_type_raises_on_side_that_notices() -> None:
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


def test_timeout_names_worker_and_handler() -> None:
    """A reply that comes after the timeout is ignored."""

    async def body(stream: MasterStream, workers: list[Answering]) -> None:
        with pytest.raises(WaitTimeout, match="model_worker/0: no reply to hold in 0.1 s"):
            await stream.request(0, "hold", Number(1), Number, timeout_s=0.1)
        workers[0].gate.set()
        assert (await stream.request(0, "echo", Number(2), Number)).value == 2

    with_workers(body)


def test_notices_that_nobody_asks_for_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realsys.cluster.stream.master_stream.MAX_UNCLAIMED", 3)

    async def body(stream: MasterStream, workers: list[Answering]) -> None:
        for number in range(4):
            workers[0].endpoint.notify("unheard", Number(number))
        with pytest.raises(StreamError, match="3 notices wait, and unheard has no callback"):
            await asyncio.wait_for(stream.request(0, "hold", Number(1), Number), BOUND_S)
        workers[0].gate.set()

    with_workers(body)


def test_pushed_groups_are_announced_to_master() -> None:
    async def run() -> None:
        stream = MasterStream()
        stored: list[str] = []

        def store(group: Group) -> SamplesArrived:
            stored.append(group.ticket.ticket_id)
            metas = [
                SampleMeta(f"{group.ticket.ticket_id}/{k}", group.ticket.ticket_id, 0, 40, 10, 0.0, False, 3, 4, 2)
                for k in range(len(group.episodes))
            ]
            return SamplesArrived(metas)

        puller = Puller()
        worker = Answering(2, stream.address, groups=GroupIntake(puller, store))
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


def test_garbage_at_master_is_counted_logged_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
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

    with caplog.at_level(logging.WARNING, "realsys.cluster.stream"):
        with_workers(body)
    assert "master: dropped message 1 from localhost:" in caplog.text


def test_closing_endpoint_waits_until_last_reply_arrives() -> None:
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


def test_endpoint_without_master_says_where_it_looked() -> None:
    """It can still be closed."""
    endpoint = WorkerEndpoint(3, "tcp://127.0.0.1:9")
    with pytest.raises(WaitTimeout, match=r"model_worker/3: no welcome from the master at tcp://127.0.0.1:9 in 0.1 s"):
        endpoint.wait_connected(0.1)
    assert endpoint.next_request(0.01) is None
    endpoint.notify("count", Number(1))
    endpoint.close(timeout_s=0.1)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(StreamError, match="cannot connect to address='nowhere'"):
        WorkerEndpoint(0, "nowhere")


def test_background_request_is_not_behind_the_main_ones() -> None:
    """Both kinds keep their order. The end of the endpoint reaches both readers."""

    async def run() -> None:
        stream = MasterStream()
        endpoint = WorkerEndpoint(0, stream.address)
        endpoint.serve_in_background("slow")
        await stream.barrier([0], BOUND_S)
        names = ("echo", "slow", "echo", "slow")
        calls = [stream.request(0, name, Number(i), Number) for i, name in enumerate(names)]
        for read, numbers in ((endpoint.next_background, (1, 3)), (endpoint.next_request, (0, 2))):
            for number in numbers:
                request = await asyncio.to_thread(read, BOUND_S)
                assert request is not None and request.decode(Number).value == number
                endpoint.reply(request, Number(number + 10))
        assert [reply.value for reply in await asyncio.gather(*calls)] == [10, 11, 12, 13]
        await asyncio.to_thread(endpoint.close)
        for read in (endpoint.next_background, endpoint.next_request):
            with pytest.raises(StreamError, match="the endpoint was closed"):
                read(BOUND_S)
        stream.close()

    asyncio.run(run())
