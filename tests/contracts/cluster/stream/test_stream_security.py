"""Keys: who is let in, and how they are kept."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from realsys.cluster.stream.master_stream import MasterStream
from realsys.cluster.stream.push_pull import Puller, Pusher, PushLimits
from realsys.cluster.stream.security import KEY_FILE, CurveKeys, ensure_keys, keys_for, load_keys
from realsys.cluster.stream.sockets import answers, private_folder
from realsys.cluster.stream.worker_endpoint import WorkerEndpoint
from realsys.config.schema import Config
from realsys.errors import ConfigError, StreamError, WaitTimeout
from realsys.launch.prepare import check_addresses
from realsys.model_calls import Empty
from tests.support.streams.stream_parts import BOUND_S, PullerThread, connect_by_hand, make_group, pulling


@pytest.fixture(scope="module")
def keys() -> CurveKeys:
    return CurveKeys.generate()


def test_keys_are_made_once_and_kept_private(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(ensure_keys, [directory] * 8))
    assert made == [made[0]] * 8
    assert load_keys(directory) == made[0]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [path.name for path in directory.iterdir()] == [KEY_FILE]
    assert stat.S_IMODE((directory / KEY_FILE).stat().st_mode) == 0o600
    assert made[0].server_secret.decode() not in repr(made[0])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.chmod(0o644), "mode 0644 lets others read them: chmod 600"),
        (lambda path: path.write_text("{}"), "missing required field"),
        (lambda path: path.write_text(path.read_text().replace('"server_public":"', '"server_public":"x')), "40 char"),
        (lambda path: path.unlink(), "No such file or directory: the launcher creates them"),
    ],
)
def test_spoiled_keys_error_names_the_file(tmp_path: Path, spoil, message: str) -> None:
    ensure_keys(tmp_path)
    spoil(tmp_path / KEY_FILE)
    with pytest.raises(StreamError, match=message) as caught:
        load_keys(tmp_path)
    assert str(tmp_path / KEY_FILE) in str(caught.value)


def test_only_loopback_needs_no_keys(tmp_path: Path) -> None:
    assert keys_for("127.0.0.1", tmp_path) is None
    assert keys_for("localhost", tmp_path) is None
    assert not list(tmp_path.iterdir())
    assert isinstance(keys_for("10.0.0.1", tmp_path), CurveKeys)
    with pytest.raises(StreamError, match=r"socket on host=0.0.0.0: beyond loopback it needs keys"):
        Puller("0.0.0.0")


async def exchange(stream: MasterStream, endpoint: WorkerEndpoint) -> None:
    """Send a request to worker 0, and its reply back."""
    call = stream.request(0, "echo", Empty(), Empty)
    request = await asyncio.to_thread(endpoint.next_request, BOUND_S)
    assert request is not None
    endpoint.reply(request, Empty())
    await asyncio.wait_for(call, BOUND_S)


@pytest.fixture
def stranger() -> Iterator[ThreadPoolExecutor]:
    """A thread whose files, and those of the threads that it starts, are checked as those of user nobody."""
    if os.getuid():
        pytest.skip("only root can become another user")
    become = ctypes.CDLL(None).setfsuid  # of one thread, unlike os.setuid
    with ThreadPoolExecutor(1, initializer=become, initargs=(65534,)) as thread:
        yield thread


def test_another_user_replaces_no_worker(stranger: ThreadPoolExecutor) -> None:
    """Its right greeting, of the newest incarnation, does not reach the master."""

    async def run() -> None:
        stream = MasterStream()
        member = WorkerEndpoint(0, stream.address, incarnation="1")
        await stream.barrier([0], BOUND_S)
        newest = stranger.submit(WorkerEndpoint, 0, stream.address, incarnation="9" * 19).result(BOUND_S)
        with pytest.raises(WaitTimeout, match="no welcome .*connection refused"):
            await asyncio.to_thread(newest.wait_connected, 1.0)
        await exchange(stream, member)
        await asyncio.to_thread(newest.close)
        await asyncio.to_thread(member.close)
        stream.close()

    asyncio.run(run())


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A TMPDIR with a short path, unlike that of ``tmp_path``."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_sockets_of_one_machine_leave_no_file(place: Path) -> None:
    puller = Puller()
    file = Path(puller.address.removeprefix("ipc://"))
    assert file.is_socket() and file.parent == private_folder() and file.parent.parent == place
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    puller.close()
    assert not list(file.parent.iterdir())


def test_a_path_too_long_for_a_socket_is_not_taken(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = place / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    Puller().close()
    assert not list(deep.iterdir())


@pytest.mark.parametrize(
    "make", [lambda path: path.mkdir(0o755), lambda path: path.symlink_to("/")], ids=["open", "link"]
)
def test_a_folder_that_others_can_use_is_refused(place: Path, make: Callable[[Path], None]) -> None:
    make(place / f"realsys-{os.getuid()}")
    with pytest.raises(StreamError, match="must be a folder of this user with mode 0700: remove it, or set TMPDIR"):
        Puller()
    with pytest.raises(ConfigError, match=r"cluster.host='127.0.0.1': .* with mode 0700"):
        check_addresses(Config())


def test_a_socket_beyond_loopback_opens_with_keys(keys: CurveKeys) -> None:
    puller = Puller("0.0.0.0", keys=keys)
    assert not puller.address.startswith("tcp://0.0.0.0:")  # an address others can connect to
    puller.close()


def test_an_address_of_another_host_is_an_error(keys: CurveKeys) -> None:
    with pytest.raises(StreamError, match=r"host=192.0.2.1: cannot bind .*; check .* an address of this machine"):
        Puller("192.0.2.1", keys=keys)


def test_members_push_and_call_under_encryption(keys: CurveKeys) -> None:
    async def run(puller: PullerThread) -> None:
        pusher = Pusher(lambda dp: puller.address, [0], "rollout_worker/0", keys=keys)
        await pusher.push(make_group("t0"))
        await pusher.close()
        stream = MasterStream(keys=keys)
        endpoint = WorkerEndpoint(0, stream.address, keys=keys)
        await stream.barrier([0], BOUND_S)
        await exchange(stream, endpoint)
        await asyncio.to_thread(endpoint.close)
        stream.close()

    puller = PullerThread(keys=keys)
    try:
        asyncio.run(run(puller))
    finally:
        puller.close()
    assert puller.tickets == ["t0"]


def test_server_answers_its_members_only(keys: CurveKeys) -> None:
    """The puller takes no part: a handshake says that it is there, with the keys of the trial."""
    puller = PullerThread(keys=keys)
    try:
        assert answers(puller.address, keys, BOUND_S)
        assert not answers(puller.address, CurveKeys.generate(), BOUND_S)
    finally:
        puller.close()
    assert not answers(puller.address, keys, BOUND_S), "nobody listens there"


def strangers(keys: CurveKeys) -> dict[str, CurveKeys | None]:
    other = CurveKeys.generate()
    own_client = replace(keys, client_public=other.client_public, client_secret=other.client_secret)
    return {"no key": None, "another trial's keys": other, "the server's public key only": own_client}


@pytest.mark.parametrize("who", ["no key", "another trial's keys", "the server's public key only"])
def test_stranger_is_not_admitted_and_is_counted(keys: CurveKeys, who: str, caplog: pytest.LogCaptureFixture) -> None:
    stranger = strangers(keys)[who]

    async def run(puller: PullerThread) -> None:
        pusher = Pusher(
            lambda dp: puller.address, [0], "stranger", keys=stranger, limits=PushLimits(push_timeout_s=0.4)
        )
        with pytest.raises(WaitTimeout, match="group t0 not acknowledged in 0.4 s by puller 0 .*"):
            await pusher.push(make_group("t0"))
        await asyncio.to_thread(puller.wait_until, lambda: puller.stats.rejected > 0)
        await pusher.close()
        stream = MasterStream(keys=keys)
        endpoint = WorkerEndpoint(0, stream.address, keys=stranger)
        with pytest.raises(WaitTimeout, match="model_worker/0 did not connect"):
            await stream.barrier([0], 0.3)
        async with asyncio.timeout(BOUND_S):
            while not stream.rejected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.to_thread(endpoint.close)
        stream.close()

    puller = PullerThread(keys=keys)
    try:
        with caplog.at_level("WARNING"):
            asyncio.run(run(puller))
    finally:
        puller.close()
    assert puller.tickets == []
    assert puller.stats.malformed == 0  # not even decoded
    assert "rejected peer 1: it" in caplog.text


def test_a_member_is_told_that_it_was_rejected(keys: CurveKeys) -> None:
    stranger = strangers(keys)["the server's public key only"]
    puller = Puller(keys=keys)
    endpoint = WorkerEndpoint(0, puller.address, keys=stranger)
    told = ""
    deadline = time.monotonic() + BOUND_S
    while "do both sides use the same keys" not in told:
        assert time.monotonic() < deadline, told
        with pytest.raises(WaitTimeout) as caught:
            endpoint.wait_connected(0.1)
        told = str(caught.value)
    endpoint.close()
    puller.close()


def test_what_crosses_the_wire_is_encrypted(keys: CurveKeys) -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    keys.secure_client(dealer)
    assert dealer.getsockopt(zmq.MECHANISM) == zmq.CURVE
    context.destroy(linger=0)


def test_members_are_not_counted_as_strangers(keys: CurveKeys) -> None:
    async def run(puller: PullerThread) -> None:
        pusher = Pusher(lambda dp: puller.address, [0], "rollout_worker/0", keys=keys)
        await pusher.push(make_group("t0"))
        await pusher.close()

    puller = PullerThread(keys=keys)
    try:
        asyncio.run(run(puller))
    finally:
        puller.close()
    assert puller.stats.rejected == 0


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"


def zmtp_peer(address: str) -> socket.socket:
    """A peer that has shaken hands by hand, so that it can say what no library would."""
    peer = connect_by_hand(address)
    peer.sendall(GREETING)
    peer.sendall(b"\x04" + bytes([len(READY)]) + READY)
    answer = b""
    while len(answer) < 64 + 2 + len(READY):
        answer += peer.recv(4096)
    return peer


def test_frame_announced_as_huge_closes_connection() -> None:
    """The connection ends before the receiver allocates memory for the frame."""
    with pulling() as puller:
        peer = zmtp_peer(puller.address)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peer.sendall(b"\x02" + (1 << 40).to_bytes(8, "big") + b"x" * 100)
        try:
            while peer.recv(4096):
                pass
        except ConnectionResetError:
            pass
        peer.close()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100 << 10  # KiB
        assert puller.tickets == [] and puller.stats.malformed == 0


def test_peer_with_other_protocol_is_cut_off() -> None:
    """Other peers are not affected."""

    async def push(puller: PullerThread) -> None:
        pusher = Pusher(lambda dp: puller.address, [0], "rollout_worker/0")
        await pusher.push(make_group("t0"))
        await pusher.close()

    with pulling() as puller:
        with connect_by_hand(puller.address) as browser:
            browser.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100))
            try:
                while browser.recv(4096):
                    pass
            except ConnectionResetError:
                pass
        asyncio.run(push(puller))
        assert puller.tickets == ["t0"]
