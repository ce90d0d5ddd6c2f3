"""Fuzz targets: whole endpoints behind real sockets. After each input a right one must still be served."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import msgspec
import zmq
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from realsys.cluster.http_server import Admission, Guard, HttpServer
from realsys.cluster.stream import codec as protocol
from realsys.cluster.stream.codec import encode_message
from realsys.cluster.stream.master_stream import MasterStream
from realsys.cluster.stream.push_pull import Puller
from realsys.errors import DecodeError, WorkerLost
from realsys.launch.nodes import orders
from realsys.launch.nodes.coordinator import AgentStream
from tests.support.fuzz.mutations import Spoiler, example
from tests.support.fuzz.stream import frames_of
from tests.support.fuzz.targets import Target

BOUND_S = 60.0
Frames = list[bytes]


class Dealer:
    """A peer that sends any frames."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(address)
        self.socket.linger = 0

    def say(self, frames: Frames) -> None:
        self.socket.send_multipart(frames or [b""])

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def pushes(spoiler: Spoiler) -> Frames:
    """A push with a spoilt header, a spoilt group, or frames too many or too few."""
    rng = spoiler.rng
    header = spoiler.encode(example(protocol.Push, rng))
    frames = [header, *frames_of(rng)]
    at = rng.randrange(len(frames))
    frames[at] = spoiler.spoil_bytes(frames[at]) if at == 2 else spoiler.spoil(frames[at])
    return frames[: rng.choice((1, 2, 3, 3, 3, 3))] + [b"x"] * (rng.random() < 0.05)


@contextmanager
def puller() -> Iterator[Target]:
    """Real frames through a real Puller; refused ones are counted by it."""
    receiver = Puller()
    dealer = Dealer(receiver.address)
    good, serial = frames_of(Random(0)), iter(range(1 << 60))

    def decode(frames: Frames) -> None:
        before = receiver.stats.malformed
        dealer.say(frames)
        number = next(serial)
        dealer.say([encode_message(protocol.Push("good", number, number)), *good])
        taken = 0
        while taken < 2:
            assert receiver.socket.poll(int(BOUND_S * 1e3)), "the puller does not receive any more"
            taken += receiver.drain(lambda group: None)
        while True:
            assert dealer.socket.poll(int(BOUND_S * 1e3)), "a good group was not acknowledged"
            answer = protocol.TO_PUSHER.decode(dealer.socket.recv())
            if isinstance(answer, protocol.PushAck) and number in answer.sequences:
                break
        if receiver.stats.malformed > before:
            raise DecodeError("counted as malformed")

    try:
        yield Target("socket: puller", pushes, decode, (DecodeError,), "msgpack")
    finally:
        dealer.close()
        receiver.close()


@contextmanager
def master() -> Iterator[Target]:
    """Real frames through a real MasterStream, whose next hello is still welcomed."""
    loop = asyncio.new_event_loop()

    async def start() -> MasterStream:
        return MasterStream()

    stream = loop.run_until_complete(start())
    dealer = Dealer(stream.address)
    serial = iter(range(1, 1 << 60))

    def make(spoiler: Spoiler) -> Frames:
        kind = spoiler.rng.choice((protocol.Hello, protocol.ReplyHeader, protocol.NoticeHeader))
        value = example(kind, spoiler.rng)
        if kind is protocol.Hello:
            value[1] = spoiler.rng.randrange(50)  # each index that says hello is remembered
        frames = [spoiler.spoil(spoiler.encode(value))]
        return frames + [spoiler.rng.randbytes(9)] * spoiler.rng.choice((0, 1, 1, 2))

    async def exchange(frames: Frames) -> None:
        dealer.say(frames)
        dealer.say([encode_message(protocol.Hello(1000, f"{next(serial):09d}", 0))])
        async with asyncio.timeout(BOUND_S):
            while True:
                assert await asyncio.to_thread(dealer.socket.poll, int(BOUND_S * 1e3)), "no answer to a good hello"
                try:
                    answer = protocol.TO_WORKER.decode(dealer.socket.recv_multipart()[0])
                except ValueError:
                    continue
                if isinstance(answer, protocol.Welcome) and 1000 in stream.connected:
                    break

    def decode(frames: Frames) -> None:
        before = stream.bad_messages
        loop.run_until_complete(exchange(frames))
        assert stream._failure is None, stream._failure
        stream._notices.unclaimed.clear()
        if stream.bad_messages > before:
            raise DecodeError("counted as bad")

    try:
        yield Target("socket: master", make, decode, (DecodeError,), "msgpack")
    finally:

        async def stop() -> None:
            stream.close()

        loop.run_until_complete(stop())
        dealer.close()
        loop.close()


@contextmanager
def coordinator() -> Iterator[Target]:
    """Spoilt notices and pongs of an agent that was welcomed; the coordinator still has its other agents."""
    loop = asyncio.new_event_loop()

    async def start() -> AgentStream:
        return AgentStream()

    stream = loop.run_until_complete(start())
    stream.on_unreadable = lambda worker, error: stream.lose(worker, str(error))  # as the coordinator does
    notices = {"Joined": orders.Joined, "Exited": orders.Exited, "StopAsked": orders.StopAsked}
    for name, kind in notices.items():
        stream.on_notice(name, kind, lambda notice: None)
    good, bad = Dealer(stream.address), Dealer(stream.address)
    numbers = {good: 0, bad: 0}  # of the messages of a dealer
    incarnations = iter(range(1, 1 << 60))

    async def welcome(dealer: Dealer, index: int) -> None:
        dealer.say([encode_message(protocol.Hello(index, f"{next(incarnations):019d}", 0))])
        numbers[dealer] = 0
        while not isinstance((await heard(dealer))[0], protocol.Welcome):
            pass

    async def heard(dealer: Dealer) -> tuple[Any, list[bytes]]:
        assert await asyncio.to_thread(dealer.socket.poll, int(BOUND_S * 1e3)), "the coordinator says nothing"
        frames = dealer.socket.recv_multipart()
        return protocol.TO_WORKER.decode(frames[0]), frames

    async def pong(dealer: Dealer, index: int, payload: bytes) -> None:
        """Reply to a Ping. Raises the error of the coordinator's call."""
        call = stream.request(index, "Ping", orders.Ping(1.0), orders.Pong, timeout_s=BOUND_S)
        while not isinstance(header := (await heard(dealer))[0], protocol.RequestHeader):
            pass
        numbers[dealer] += 1
        dealer.say([encode_message(protocol.ReplyHeader(numbers[dealer], header.number, None)), payload])
        await call

    def make(spoiler: Spoiler) -> tuple[str, bytes]:
        name = spoiler.rng.choice(("Pong", *notices))
        return name, spoiler.spoil(spoiler.encode(example(notices.get(name, orders.Pong), spoiler.rng)))

    async def exchange(name: str, payload: bytes) -> None:
        if 1 not in stream.connected:
            await welcome(bad, 1)
        if name == "Pong":
            await pong(bad, 1, payload)
            return
        numbers[bad] += 1
        bad.say([encode_message(protocol.NoticeHeader(numbers[bad], name)), payload])
        await pong(bad, 1, right)  # lost, if the notice could not be read

    right = encode_message(example_pong())

    def decode(chosen: tuple[str, bytes]) -> None:
        try:
            loop.run_until_complete(exchange(*chosen))
        finally:
            assert stream._failure is None, stream._failure
            loop.run_until_complete(pong(good, 0, right))

    loop.run_until_complete(welcome(good, 0))
    try:
        yield Target("socket: coordinator", make, decode, (DecodeError, WorkerLost), "msgpack", weight=0.5)
    finally:

        async def stop() -> None:
            stream.close()

        loop.run_until_complete(stop())
        good.close()
        bad.close()
        loop.close()


def example_pong() -> orders.Pong:
    """A Pong with any valid content."""
    return msgspec.convert(example(orders.Pong, Random(0)), orders.Pong)


@contextmanager
def http() -> Iterator[Target]:
    """Raw bytes to a service: a request line, headers and a body, each spoilt."""

    async def echo(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(len(await request.body())))

    app = Starlette(routes=[Route("/echo", echo, methods=["GET", "POST"])])
    server = HttpServer(Guard(app, Admission("token"), max_body=1000, error=lambda message: {"error": message}))
    server.start()
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    valid = b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer token\r\n"
    bodies = (b"Content-Length: 5\r\n\r\nhello", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n")

    def ask(data: bytes) -> bytes:
        with socket.create_connection((host, int(port)), timeout=BOUND_S) as connection:
            answer = b""
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(65536):
                    answer += part
            except TimeoutError:
                raise
            except OSError:  # it has closed the connection already
                pass
            return answer

    def make(spoiler: Spoiler) -> bytes:
        return spoiler.spoil_bytes(valid + spoiler.rng.choice(bodies))

    def decode(data: bytes) -> None:
        answer = ask(data)
        assert ask(valid + bodies[0]).startswith(b"HTTP/1.1 200"), "a good request was not served"
        if not answer.startswith(b"HTTP/1.1 2"):
            assert b" 500 " not in answer[:20], answer
            raise DecodeError("refused, or the connection was closed")

    try:
        yield Target("socket: HTTP", make, decode, (DecodeError,), weight=0.5)
    finally:
        server.close()


PARTS: tuple[Callable[[], Any], ...] = (puller, master, coordinator, http)
