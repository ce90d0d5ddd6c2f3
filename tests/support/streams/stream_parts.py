"""Parts for the tests of the streams: groups, a puller in a thread, a proxy whose connections can be cut."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import zmq

from realsys.cluster.stream.push_pull import Puller, Pusher
from realsys.cluster.stream.security import CurveKeys
from realsys.types import Episode, Group, Ticket
from tests.support.training.sample_records import make_row

BOUND_S = 60.0  # no wait of a test is longer


def make_group(ticket_id: str, episodes: int = 2, length: int = 40, prompt: int = 10) -> Group:
    """Single-turn episodes whose weights changed in the middle; rewards 0, 1, ..."""
    rng = np.random.default_rng(length)
    size = length - prompt
    versions = np.repeat(np.array([3, 4], dtype=np.int32), [size // 2, size - size // 2])
    rows = [
        make_row(rng.integers(0, 1000, length, dtype=np.int32), -rng.random(size, dtype=np.float32), versions.copy())
        for _ in range(episodes)
    ]
    made = [Episode([row], float(k), correct=k > 0) for k, row in enumerate(rows)]
    return Group(Ticket(ticket_id, 0, 5), made, "rollout_worker/0", 1.0, 2.0, {"turns": 1.0})


@contextmanager
def router_by_hand() -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """Yield a socket in place of a master or a puller, whose messages the test reads and writes, and its address."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        yield router, f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"


def names(count: int) -> list[str]:
    return [f"t{i}" for i in range(count)]


async def push_all(pusher: Pusher, tickets: list[str]) -> None:
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*(pusher.push(make_group(ticket)) for ticket in tickets))


class PullerThread:
    """A Puller served by a thread, as an endpoint would. ``store`` may refuse (StreamError) or raise PullerCrash."""

    def __init__(self, store: Callable[[Group], None] | None = None, keys: CurveKeys | None = None) -> None:
        self._puller = Puller(keys=keys)
        self.address, self.stats = self._puller.address, self._puller.stats
        self.tickets: list[str] = []
        self._store = store
        self._arrived = threading.Condition()
        self._context = zmq.Context()
        self._stop, self._stopped = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._stopped.bind("inproc://stop")
        self._stop.connect("inproc://stop")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait_for(self, count: int) -> list[str]:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.tickets) >= count, BOUND_S), (count, self.tickets)
            return list(self.tickets)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until ``holds()`` is true; it is evaluated after each batch of messages."""
        with self._arrived:
            assert self._arrived.wait_for(holds, BOUND_S), self.stats

    def join(self) -> None:
        """Wait for the end of a thread whose ``store`` raises."""
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()
        self._stop.close(linger=0)
        self._context.term()

    def close(self) -> None:
        self._stop.send(b"")
        self.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._puller.socket, zmq.POLLIN)
        poller.register(self._puller.monitor, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        try:
            while self._stopped not in dict(poller.poll()):
                self._puller.drain(self._take)
                self._puller.count_rejected()
                with self._arrived:
                    self._arrived.notify_all()
        except PullerCrash:
            pass
        finally:
            self._puller.close()
            self._stopped.close(linger=0)

    def _take(self, group: Group) -> None:
        if self._store is not None:
            self._store(group)
        with self._arrived:
            self.tickets.append(group.ticket.ticket_id)
            self._arrived.notify_all()


class PullerCrash(Exception):
    """Ends a PullerThread before the group in hand is acknowledged."""


@contextmanager
def pulling(store: Callable[[Group], None] | None = None) -> Iterator[PullerThread]:
    puller = PullerThread(store)
    try:
        yield puller
    finally:
        puller.close()


def connect_by_hand(address: str) -> socket.socket:
    """Return a socket without ZMQ that is connected to a stream."""
    if not address.startswith("ipc://"):
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        return socket.create_connection((host, int(port)), timeout=BOUND_S)
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(BOUND_S)
    peer.connect(address.removeprefix("ipc://"))
    return peer


class CuttableProxy:
    """Forwards TCP connections to a stream until ``cut`` closes those that are open; new ones are taken again."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted = 0
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        with self._lock:
            for sock in self._open:
                _shut(sock)
            self._open.clear()

    def close(self) -> None:
        _shut(self._listener)
        self._threads[0].join(BOUND_S)
        self.cut()
        for thread in self._threads:
            thread.join(BOUND_S)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                self._listener.close()
                return
            far = connect_by_hand(self._target)
            with self._lock:
                self.accepted += 1
                self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._forward, args=(source, sink), daemon=True)
                self._threads.append(thread)
                thread.start()

    @staticmethod
    def _forward(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass  # cut, or a peer is gone: either way this direction is over
        _shut(sink)
        source.close()


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # not connected any more
