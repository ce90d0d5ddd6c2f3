"""Faults from outside of the run's processes: strangers on its sockets, a disk that fills, a launcher that ends.

Each function is called while the run trains, and returns after its harm. The driver checks the recovery.
"""

import contextlib
import itertools
import json
import random
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from realsys.cluster.names.connect import store_address
from realsys.config.paths import read_config
from realsys.launch.nodes.orders import read_address
from tests.chaos.live import ChaosRun
from tests.chaos.schedule.rows import LOST_S, SUSPENDED_S
from tests.support.streams.stream_parts import connect_by_hand

BALLAST = "ballast"  # file that takes the room left on a disk
DISK_BYTES = 64 << 20
_SAYS_FULL = "No space left on device"


# ---- strangers


def garbage_to_puller(run: ChaosRun) -> None:
    _garbage_to_zmq(_address(run, "pull"))


def garbage_to_master(run: ChaosRun) -> None:
    _garbage_to_zmq(json.loads(_address(run, "trainer/request_reply"))["address"])


def garbage_to_manager(run: ChaosRun) -> None:
    token = run.live.job.paths.token.read_text().strip()
    paths = ("/allocate_rollout", "/finish_rollout", "/trained", "/schedule_request", "/evaluate", "/no_such_call")
    _garbage_to_http(_address(run, "gserver_manager"), paths, token)


def garbage_to_etcd(run: ChaosRun) -> None:
    config = read_config(run.live.job.paths.config)
    host, _, port = store_address(config, run.live.job.paths).rpartition(":")
    rng = random.Random(port)
    # No HTTP/2; its preface, then no frame of it; a frame that announces more than comes; nothing.
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for data in (rng.randbytes(4096), preface + rng.randbytes(4096), preface + b"\xff\xff\xff\x00" + bytes(100), b""):
        _raw(host, int(port), data)


def garbage_to_server(run: ChaosRun) -> None:
    token = run.live.job.paths.token.read_text().strip()
    url = json.loads(_address(run, "generation_server"))["url"]
    _garbage_to_http(url, ("/generate", "/update_weights_from_disk", "/no_such_call"), token)
    # Without the token: its owner may pause a server.
    _garbage_to_http(url, ("/pause_generation", "/abort_request", "/flush_cache"), "wrong")


def _address(run: ChaosRun, key: str) -> str:
    store, names = run.name_store()
    try:
        (value,) = store.get_subtree(f"{names.root}/{key}").values()
        return value
    finally:
        store.close()


def _garbage_to_zmq(address: str) -> None:
    """Send well-formed messages of nonsense, then bytes that are no ZMTP, then nothing on an open connection."""
    rng = random.Random(address)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.SNDTIMEO, 300)
    try:
        dealer.connect(address)
        with contextlib.suppress(zmq.Again):  # where keys are needed, the peer has cut the connection
            for frames, size in itertools.product(range(1, 6), (0, 1, 7, 1000, 1 << 20)):
                dealer.send_multipart([rng.randbytes(size) for _ in range(frames)])
    finally:
        dealer.close(linger=2000)
        context.term()
    for data in (rng.randbytes(4096), b"\xff" + bytes(8) + b"\x7f", b"GET / HTTP/1.1\r\n\r\n", b""):
        with contextlib.suppress(OSError):
            _say(connect_by_hand(address), data)


def _garbage_to_http(url: str, paths: tuple[str, ...], token: str) -> None:
    """Send data that is no HTTP, no JSON, not the right JSON, too large, or not allowed."""
    rng = random.Random(url)
    where = urlsplit(url)
    host, port = where.hostname or "", where.port or 0
    for data in (rng.randbytes(4096), b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"x" * 100_000, b"POST", b""):
        _raw(host, port, data)
    bodies = (b"", b"{", b"[]", b"null", rng.randbytes(1000), b'{"a":' * 2000, b"[" * 100_000, b'{"ticket_id": 1e999}')
    for path in paths:
        for secret in (token, "wrong"):
            for body in bodies:
                head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\nConnection: close\r\n"
                _raw(host, port, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        _raw(host, port, f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 50}\r\n\r\nx".encode())


def _raw(host: str, port: int, data: bytes) -> None:
    """Send, stop writing, read until the peer closes.

    The peer may reset the connection at any time; a shutdown then fails with ENOTCONN, which is no ConnectionError.
    """
    with contextlib.suppress(OSError):
        _say(socket.create_connection((host, port), 5), data)


def _say(sock: socket.socket, data: bytes) -> None:
    with sock as peer:
        peer.settimeout(2)
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(1 << 16):
            pass


def garbage_to_coordinator(run: ChaosRun) -> None:
    address = read_address(run.live.job.paths.coordinator)
    assert address is not None
    _garbage_to_zmq(address.address)


# ---- the launcher


def suspend_launcher(run: ChaosRun) -> None:
    """Suspend the launcher for longer than the leases of the workers."""
    _suspend_launcher(run, SUSPENDED_S)


def suspend_launcher_until_lost(run: ChaosRun) -> None:
    """Suspend the launcher until every agent has ended its processes."""
    _suspend_launcher(run, LOST_S)


def _suspend_launcher(run: ChaosRun, seconds: float) -> None:
    # Not at a failpoint: an agent whose lease lapses kills the process that would wake the launcher.
    launcher = run.live.process
    launcher.send_signal(signal.SIGSTOP)
    try:
        run.stop.wait(seconds)
    finally:
        launcher.send_signal(signal.SIGCONT)


def kill_launcher(run: ChaosRun) -> None:
    """SIGKILL, and the same command again."""
    run.live.process.kill()
    run.live.process.wait()
    run.live.start_again()


# ---- the disk


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system of ``DISK_BYTES`` at ``folder``. Needs root."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill_disk(run: ChaosRun) -> None:
    """Leave no room for weights until a worker has reported it."""
    fill_disk_for_good(run)
    said = lambda: any(_SAYS_FULL in path.read_text() for path in run.live.job.paths.errors.glob("*.json"))  # noqa: E731
    try:
        run.until(said, "an error file that says that the disk is full", 120)
    finally:
        (run.root / "weights" / BALLAST).unlink()


def fill_disk_for_good(run: ChaosRun) -> None:
    with (run.root / "weights" / BALLAST).open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
