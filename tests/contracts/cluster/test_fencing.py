"""A worker that was suspended beyond its lease does nothing that others see when it wakes up.

Real processes: each is suspended right before its act, and the cause of the act (a line on stdin, a message, a request)
arrives only when its lease has lapsed. So whichever of its threads runs first, nothing of the act may be seen. The
same body without the suspension shows the act with a valid lease.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from realsys.cluster.process import read_errors
from realsys.cluster.stream.master_stream import MasterStream
from realsys.cluster.stream.push_pull import Pusher
from realsys.errors import StreamError
from realsys.weights.disk import manifest
from tests.support.processes.fenced_bodies import DONE
from tests.support.processes.tester_trial import BOUND_S, Trial
from tests.support.streams.stream_parts import make_group, pulling

LEASE_S = 5.0  # a test waits for its end; it must outlive the start of a worker on a slow machine


@pytest.fixture
def trial(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trial]:
    made = Trial(tmp_path, lease_s=LEASE_S if request.node.callspec.params["suspended"] else 600.0)
    yield made
    made.close()


def start(trial: Trial, body: str) -> subprocess.Popen[str]:
    return trial.run(f"from tests.support.processes.fenced_bodies import run; run({body!r})")


def say_go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def wakes_up_fenced(trial: Trial, process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGCONT)
    trial.ends(process, 75)
    (record,) = read_errors(trial.paths.errors)
    assert record.type == "Fenced" and "must stop" in record.message


@pytest.mark.parametrize("suspended", [False, True])
def test_master_publishes_only_with_its_lease(trial: Trial, suspended: bool) -> None:
    process = start(trial, "publishes")
    trial.ready()
    if suspended:
        trial.suspend(process)
    say_go(process)
    if suspended:
        wakes_up_fenced(trial, process)
    else:
        trial.ends(process, 0)
    versions = manifest.complete_versions(trial.paths.weights())
    published = trial.store.get_subtree(trial.names.model_version())
    assert (len(versions), len(published)) == ((0, 0) if suspended else (1, 1))
    assert (trial.paths.root / DONE).exists() is not suspended


@pytest.mark.parametrize("suspended", [False, True])
def test_rollout_worker_pushes_only_with_its_lease(trial: Trial, suspended: bool) -> None:
    with pulling() as puller:
        trial.store.add(trial.names.pull(0), puller.address)
        process = start(trial, "pushes")
        trial.ready()
        if suspended:
            trial.store.delete(trial.names.pull(0))  # else the trial's part of the name store never becomes empty
            trial.suspend(process)
        say_go(process)
        if suspended:
            wakes_up_fenced(trial, process)
        else:
            trial.ends(process, 0)
        assert puller.tickets == (["before"] if suspended else ["before", "after"])
    assert (trial.paths.root / DONE).exists() is not suspended


@pytest.mark.parametrize("suspended", [False, True])
def test_head_stores_and_acknowledges_only_with_its_lease(trial: Trial, suspended: bool) -> None:
    async def run() -> None:
        stream = MasterStream()
        trial.store.add(trial.names.request_reply, stream.address)
        process = start(trial, "receives")
        await stream.barrier([0], BOUND_S)
        address = await asyncio.to_thread(trial.ready)
        pusher = Pusher(lambda dp: address, [0], "rollout_worker/0")
        await pusher.push(make_group("before"))
        if suspended:
            trial.store.delete(trial.names.request_reply)
            await asyncio.to_thread(trial.suspend, process)
        push = asyncio.create_task(pusher.push(make_group("after")))
        if suspended:
            await asyncio.sleep(0)  # it is on its way
            await asyncio.to_thread(wakes_up_fenced, trial, process)
            await pusher.close()
            with pytest.raises(StreamError, match="the pusher was closed"):
                await push
        else:
            await push
            await pusher.close()
            process.terminate()
            await asyncio.to_thread(trial.ends, process, 0)
        stream.close()

    asyncio.run(run())
    stored = sorted(path.name for path in trial.paths.root.glob("stored *"))
    assert stored == (["stored before"] if suspended else ["stored after", "stored before"])


def answer_to(url: str, path: str, body: object, process: subprocess.Popen[str] | None) -> bytes:
    """Return the bytes of one connection until it ends. ``process`` is woken up once the kernel has the request."""
    where = urlsplit(url)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: {len(data)}\r\n"
    with socket.create_connection((where.hostname, where.port), timeout=BOUND_S) as connection:
        connection.sendall(head.encode() + b"Connection: close\r\n\r\n" + data)
        if process is not None:
            process.send_signal(signal.SIGCONT)
        answer = b""
        try:
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass  # the process ended with the request unread
        return answer


def ledger(trial: Trial) -> bytes:
    return trial.paths.ledger.read_bytes() if trial.paths.ledger.exists() else b""


CALLS = {
    "manages": ("/evaluate", {"eval_id": "e", "split": "train", "n": 2}),
    "generates": ("/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}),
}


@pytest.mark.parametrize("suspended", [False, True])
@pytest.mark.parametrize("service", CALLS)
def test_service_answers_only_with_its_lease(trial: Trial, service: str, suspended: bool) -> None:
    process = start(trial, service)
    url = trial.ready()
    if suspended:
        trial.suspend(process)
    before = ledger(trial)
    answer = answer_to(url, *CALLS[service], process if suspended else None)
    if suspended:
        wakes_up_fenced(trial, process)
        assert answer == b""
        assert ledger(trial) == before
    else:
        assert answer.startswith(b"HTTP/1.1 200"), answer
        process.terminate()
        trial.ends(process, 0)
