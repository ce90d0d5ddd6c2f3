"""The streams against peers that are broken, and threads that hang: nothing grows or waits without bound."""

from __future__ import annotations

import asyncio
import logging
import threading

import msgspec
import pytest
import zmq

from realsys.cluster.stream import push_pull as pullers
from realsys.cluster.stream import worker_endpoint as endpoints
from realsys.cluster.stream.codec import (
    TO_MASTER,
    Hello,
    Push,
    PushAck,
    PushNack,
    Welcome,
    decode_with,
    encode_group,
    encode_message,
)
from realsys.cluster.stream.master_stream import MasterStream
from realsys.cluster.stream.push_pull import Puller, Pusher
from realsys.cluster.stream.worker_endpoint import GroupIntake, WorkerEndpoint
from realsys.errors import DecodeError, Fenced
from realsys.model_calls import Empty
from tests.support.streams.stream_parts import BOUND_S, make_group, router_by_hand


def test_close_returns_although_io_thread_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(endpoints, "IO_THREAD_S", 0.1)
    storing, go_on = threading.Event(), threading.Event()

    def store(group: object) -> None:
        storing.set()
        assert go_on.wait(BOUND_S)

    async def run() -> None:
        stream, puller = MasterStream(), Puller()
        worker = WorkerEndpoint(0, stream.address, GroupIntake(puller, store))
        await stream.barrier([0], BOUND_S)
        pusher = Pusher(lambda dp: puller.address, [0], "rollout_worker/0")
        push = asyncio.create_task(pusher.push(make_group("t0")))
        assert await asyncio.to_thread(storing.wait, BOUND_S)
        await asyncio.to_thread(worker.close)
        assert "model_worker/0: its I/O thread did not end within 0.1 s" in caplog.text
        go_on.set()
        await asyncio.to_thread(worker._thread.join, BOUND_S)
        assert not worker._thread.is_alive()
        await asyncio.to_thread(worker.close)  # what was left behind
        await pusher.close()
        await asyncio.wait([push])
        push.exception()
        stream.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())


def test_impossible_worker_number_is_refused() -> None:
    """A worker number that no trial has is refused and not stored."""
    last = Hello((1 << 48) - 1, "1", 0)
    assert decode_with(TO_MASTER, encode_message(last), "message") == last
    for index in (1 << 48, 1 << 60):
        with pytest.raises(DecodeError, match="Expected `int` <= 281474976710655"):
            decode_with(TO_MASTER, encode_message(Hello(index, "1", 0)), "message")


def test_outcomes_of_a_broken_sender_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its floor never rises. A group whose outcome is discarded is neither stored again nor called stored."""
    monkeypatch.setattr(pullers, "MAX_OUTCOMES", 8)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    puller, stored = Puller(), list[str]()
    group = encode_group(make_group("t"))

    def push(sequence: int) -> PushAck | PushNack:
        dealer.send_multipart([encode_message(Push("broken", sequence, 0)), *group])
        assert puller.socket.poll(BOUND_S * 1000)
        puller.drain(lambda taken: stored.append(taken.ticket.ticket_id))
        assert dealer.poll(BOUND_S * 1000)
        return msgspec.msgpack.decode(dealer.recv(), type=PushAck | PushNack)

    try:
        dealer.connect(puller.address)
        for sequence in range(100):
            assert push(sequence) == PushAck([sequence])
        (sender,) = puller._senders.values()
        assert len(sender.outcomes) <= 9
        assert push(99) == PushAck([99])
        assert push(0) == PushNack(0, "its sender has cancelled it")
        assert len(stored) == 100 and puller.stats.duplicates == 2
    finally:
        context.destroy(linger=0)
        puller.close()


def test_undecodable_puller_message_is_counted_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def run(router: zmq.Socket[bytes], address: str) -> None:
        pusher = Pusher(lambda dp: address, [0], "rollout_worker/0")
        push = asyncio.create_task(pusher.push(make_group("t0")))
        assert await asyncio.to_thread(router.poll, BOUND_S * 1000)
        route = router.recv_multipart()[0]
        for bad in (b"", b"\xc1", b"[" * 100_000):
            router.send_multipart([route, bad])
        router.send_multipart([route, encode_message(PushAck([0]))])
        await asyncio.wait_for(push, BOUND_S)
        assert pusher.bad_messages == 3
        assert f"dropped message 1 of puller 0 at {address}" in caplog.text
        await pusher.close()

    with caplog.at_level(logging.WARNING), router_by_hand() as (router, address):
        asyncio.run(run(router, address))


class Lease:
    """Holds until it is lost."""

    held = True

    def check(self) -> None:
        if not self.held:
            raise Fenced("this worker must stop")


def test_a_master_without_its_lease_answers_no_greeting() -> None:
    """Else a worker that comes back would be sent its requests again by a master that is dead to everyone else."""

    async def run() -> None:
        lease = Lease()
        stream = MasterStream(check_alive=lease.check)
        endpoint = WorkerEndpoint(0, stream.address)
        await stream.barrier([0], BOUND_S)
        call = stream.request(0, "save_weights", Empty(), Empty)
        assert await asyncio.to_thread(endpoint.next_request, BOUND_S) is not None
        lease.held = False
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(stream.address)
        dealer.send(encode_message(Hello(0, endpoint.incarnation, 0)))
        with pytest.raises(Exception, match="this worker must stop"):
            await asyncio.wait_for(call, BOUND_S)
        assert not await asyncio.to_thread(dealer.poll, 50)
        context.destroy(linger=0)
        await asyncio.to_thread(endpoint.close)
        stream.close()

    asyncio.run(run())


def test_a_worker_without_its_lease_sends_nothing_again() -> None:
    """Suspended after the welcome has come: the notice that waits for it stays here."""
    lease, welcome = Lease(), threading.Event()
    ended: list[BaseException] = []
    previous = threading.excepthook
    threading.excepthook = lambda args: ended.append(args.exc_value) if args.exc_value else None
    try:
        with router_by_hand() as (router, address):
            worker = WorkerEndpoint(0, address, check_alive=lease.check)
            assert router.poll(BOUND_S * 1000)
            route, _ = router.recv_multipart()
            worker.notify("recorded", Empty())
            lose_on_welcome(worker, lease, welcome)
            router.send_multipart([route, encode_message(Welcome(0))])
            assert welcome.wait(BOUND_S)
            worker._thread.join(BOUND_S)
            assert not worker._thread.is_alive()
            assert not router.poll(50), "it has sent something"
            worker.close()
    finally:
        threading.excepthook = previous
    assert [type(error) for error in ended] == [Fenced]


def lose_on_welcome(worker: WorkerEndpoint, lease: Lease, welcome: threading.Event) -> None:
    """The lease is lost between the check of the loop and the sending."""
    discard = worker._io._discard_up_to

    def lose(number: int) -> None:
        lease.held = False
        welcome.set()
        discard(number)

    worker._io._discard_up_to = lose  # type: ignore[method-assign]
