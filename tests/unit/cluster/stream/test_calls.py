"""Calls to several workers: what completes one, what fails it, and which requests may be sent again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import zmq

from realsys.cluster.stream.codec import Ack, FailureReply, encode_message
from realsys.cluster.stream.master_stream import Acknowledgements, Message, OpenCall, Peer, name_workers, open_call
from realsys.errors import DecodeError, RemoteError, WaitTimeout
from realsys.model_calls import TransferReply
from tests.support.streams.stream_parts import BOUND_S


def with_call(body: Callable[[OpenCall, list[Peer]], None], workers: int = 3) -> None:
    """Run ``body`` with a call to some workers whose requests are on their way."""

    async def run() -> None:
        peers = [Peer(worker, f"model_worker/{worker}", "1", b"") for worker in range(workers)]
        call = open_call("transfer", TransferReply, range(workers), BOUND_S)
        for peer in peers:
            call.add_request(peer, b"payload")
        body(call, peers)
        call.result.cancel()
        await asyncio.sleep(0)
        assert not any(peer.requests for peer in peers), "a request of a call that has ended would be sent again"

    asyncio.run(run())


def reply(received: int) -> zmq.Frame:
    return zmq.Frame(encode_message(TransferReply(received)))


def test_replies_keep_the_order_of_workers() -> None:
    def body(call: OpenCall, peers: list[Peer]) -> None:
        for worker in (2, 0, 1):
            assert not call.result.done()
            call.take_reply(peers[worker], None, reply(worker))
        assert [each.received for each in call.result.result()] == [0, 1, 2]
        assert not any(peer.requests for peer in peers)

    with_call(body)


@pytest.mark.parametrize(
    ("failure", "payload", "error"),
    [
        (FailureReply("ValueError", "no such key", "trace"), reply(0), RemoteError),
        (None, zmq.Frame(b"\xc1"), DecodeError),
    ],
)
def test_first_failure_ends_the_call(failure: FailureReply | None, payload: zmq.Frame, error: type[Exception]) -> None:
    def body(call: OpenCall, peers: list[Peer]) -> None:
        call.take_reply(peers[1], failure, payload)
        with pytest.raises(error, match="model_worker/1"):
            call.result.result()
        call.fail(ValueError("follows from the first"))

    with_call(body)


def test_discarded_request_leaves_those_of_successor() -> None:
    """A new incarnation counts its requests from 1 again."""

    def body(call: OpenCall, peers: list[Peer]) -> None:
        successor = Peer(0, "model_worker/0", "2", b"")
        open_call("clear", TransferReply, [0], BOUND_S).add_request(successor, b"payload")
        call.discard()
        assert list(successor.requests) == [1]

    with_call(body)


def test_timeout_names_some_of_many_workers() -> None:
    def body(call: OpenCall, peers: list[Peer]) -> None:
        call.take_reply(peers[0], None, reply(0))
        call.expire(2.0)
        with pytest.raises(WaitTimeout, match="model_worker/1, .*, model_worker/8 and 11 others: no reply to transfer"):
            call.result.result()

    with_call(body, 20)


def test_few_workers_are_all_named() -> None:
    assert name_workers(["a", "b"]) == "a, b"


def test_one_ack_for_each_peer_without_later_request() -> None:
    async def run() -> None:
        sent: list[Message] = []
        acks = Acknowledgements(sent.extend)
        peers = [Peer(worker, f"model_worker/{worker}", "1", bytes([worker])) for worker in range(3)]
        for number in (1, 2):
            for peer in peers:
                peer.last_message = number
                acks.add(peer)
        acks.discard(peers[1:2])
        acks.send()
        acks.send()
        assert sent == [(bytes([worker]), [encode_message(Ack(2))]) for worker in (0, 2)]

    asyncio.run(run())
