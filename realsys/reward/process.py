"""The inside of a verifier process: ``python -m realsys.reward.process FD PARENT MEMORY``.

Consumes batches from the socket FD; waits for the next one; ends when the other side is closed, or with its parent.
Nothing is imported here that is not needed: the process is to be small and to start fast.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable

import msgspec

from realsys.cluster import failpoint
from realsys.reward.messages import LENGTH, Batch, Failed, Results, frame
from realsys.reward.verifiers import Verifier, load_verifier

_PR_SET_PDEATHSIG = 1
_MESSAGE_LIMIT = 500  # characters of an exception


def main(argv: list[str]) -> None:
    descriptor, parent, memory = (int(argument) for argument in argv)
    _end_with(parent)
    failpoint.arm("verifier/0")
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    with socket.socket(fileno=descriptor) as channel:
        serve(channel)


def serve(channel: socket.socket) -> None:
    """Answer batches until the channel closes."""
    verifiers: dict[str, Verifier] = {}
    channel.sendall(frame(Results([])))
    while (batch := _receive(channel)) is not None:
        try:
            if batch.name not in verifiers:
                verifiers[batch.name] = load_verifier(batch.name)
                channel.sendall(frame(Results([])))  # from here the time limit counts
        except Exception as error:
            channel.sendall(frame(Failed(describe(error), [], loading=True)))
            continue
        verify_batch(verifiers[batch.name], batch, lambda message: channel.sendall(frame(message)))


def verify_batch(verifier: Verifier, batch: Batch, send: Callable[[msgspec.Struct], None]) -> None:
    """Verify the items in order. One message for all of them, unless they take long."""
    verdicts: list[bool] = []
    reported = time.monotonic()
    for item in batch.items:
        if verdicts and time.monotonic() - reported > batch.report_s:
            send(Results(verdicts))
            verdicts, reported = [], time.monotonic()
        try:
            failpoint.reach("verifier.judge")
            verdict = verifier(item.prompt, item.answer, item.reference)
            if not isinstance(verdict, bool):
                raise TypeError(f"returned {verdict!r:.100}, not True or False")
        except Exception as error:  # the request boundary: reported, never a verdict
            send(Failed(describe(error), verdicts))
            return
        verdicts.append(verdict)
    send(Results(verdicts))


def describe(error: Exception) -> str:
    """One line; an exception may carry something huge or fail to print."""
    try:
        text = str(error)
    except Exception:
        text = "its message cannot be printed"
    return f"{type(error).__name__}: {' '.join(text[:_MESSAGE_LIMIT].split())}"


def _receive(channel: socket.socket) -> Batch | None:
    header = _read(channel, LENGTH.size)
    if header is None:
        return None
    body = _read(channel, LENGTH.unpack(header)[0])
    return None if body is None else msgspec.msgpack.decode(body, type=Batch)


def _read(channel: socket.socket, size: int) -> bytes | None:
    """Exactly ``size`` bytes; None when the other side has closed."""
    data = bytearray()
    while len(data) < size:
        chunk = channel.recv(min(size - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def _end_with(parent: int) -> None:
    """SIGKILL when the parent ends, also while a verifier hangs and nobody reads the channel."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
