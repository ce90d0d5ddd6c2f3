"""The floor of the request-reply stream: the same bytes to as many workers with nothing but ZMQ.

    ROUTER ──header, payload──> DEALER of each worker, which sends both back

Keys, contexts and threads are those of the real stream: each worker has a context and a thread of its own.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import zmq

from benchmarks._processes import helper_processes
from realsys.cluster.stream import sockets
from realsys.cluster.stream.security import CurveKeys

Times = dict[str, float]  # unit -> milliseconds

#: about the sizes of an empty request
HEADER, PAYLOAD = bytes(24), bytes(40)


def echo(address: str, keys: CurveKeys, workers: int, pipe: Connection) -> None:
    """Send back every message, in a thread for each worker; end when the process is killed."""
    pipe.send("imported")
    pipe.recv()
    for _ in range(workers):
        threading.Thread(target=_echo, args=(address, keys), daemon=True).start()
    pipe.recv()


def _echo(address: str, keys: CurveKeys) -> None:
    dealer, _ = sockets.connect_client(zmq.Context(), address, keys)
    dealer.send(b"hello")
    while True:
        dealer.send_multipart(dealer.recv_multipart())


def round_trips(workers: int, processes: int, rounds: int, bound_s: float) -> list[Times]:
    """Return the times of each round: until the last reply, and CPU times of the two ends."""
    keys = CurveKeys.generate()
    server = sockets.bind_server("127.0.0.1", keys)
    shares = [(server.address, keys, len(range(share, workers, processes))) for share in range(processes)]
    try:
        with helper_processes(echo, shares, bound_s) as pipes:
            for pipe in pipes:
                pipe.send("start")
            routes = [_receive(server, bound_s)[0] for _ in range(workers)]
            return [_round_trip(server, routes, bound_s) for _ in range(rounds + 1)][1:]  # the first one warms up
    finally:
        server.close()


def _round_trip(server: sockets.ServerSocket, routes: Sequence[bytes], bound_s: float) -> Times:
    clocks = Clocks()
    for route in routes:
        sockets.send_frames(server.socket, [route, HEADER, PAYLOAD])
    for _ in routes:
        _receive(server, bound_s)
    return clocks.passed()


def _receive(server: sockets.ServerSocket, bound_s: float) -> list[bytes]:
    assert server.socket.poll(int(1000 * bound_s)), f"no message in {bound_s:g} s"
    return server.socket.recv_multipart(zmq.NOBLOCK)


class Clocks:
    """Times from the making of this object: of the wall, this process, this thread, and its child processes."""

    def __init__(self) -> None:
        self._began = _read_clocks()

    def passed(self) -> Times:
        """Return the times, in milliseconds."""
        return {unit: 1000 * (now - self._began[unit]) for unit, now in _read_clocks().items()}


def _read_clocks() -> dict[str, float]:
    # Linux has a clock for each process; its number is made from the process's. /proc counts in ticks of 10 ms only.
    children = [(~child.pid << 3) | 2 for child in multiprocessing.active_children() if child.pid is not None]
    return {
        "ms": time.perf_counter(),
        "cpu ms": time.process_time(),
        "loop ms": time.thread_time(),
        "endpoints ms": sum(map(time.clock_gettime, children)),
    }
