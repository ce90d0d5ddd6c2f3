"""The request of `realsys stop`: a file in the trial folder, which every node sees.

    realsys stop ──writes──> {trial}/stop ──the launcher reads and removes it──> ends the run as SIGTERM does

The same file serves trials on this machine, on other nodes, and in SLURM jobs. Whoever can write into the folder may
stop the trial. A request that no launcher has taken is removed by the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import signal
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

_LOOK_S = 0.5


def ask_to_stop(path: Path) -> None:
    """Write a request. Atomic. Raises OSError."""
    staged = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    staged.write_text(f"{_user()}@{socket.gethostname()}\n", encoding="utf-8")
    os.replace(staged, path)


def take_request(path: Path) -> str:
    """Return who asks for a stop, and remove the request; "" without one."""
    try:
        asked_by = path.read_text(encoding="utf-8", errors="replace").strip() or "an empty file"
        path.unlink()
    except OSError:  # there is none, or it cannot be removed: then it is not obeyed again and again
        return ""
    return asked_by[:200]


async def watch_requests(path: Path, stop: Callable[[str], None]) -> None:
    """Call ``stop`` with the name of the user for each request, until cancelled."""
    while True:
        if asked_by := await asyncio.to_thread(take_request, path):
            stop(asked_by)
        await asyncio.sleep(_LOOK_S)


def _user() -> str:
    with contextlib.suppress(OSError, KeyError, ImportError):
        return getpass.getuser()
    return f"user {os.getuid()}"


# ---- the signals that ask a launcher or an agent to stop


#: SIGUSR1 comes from a batch system shortly before its time limit
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextlib.contextmanager
def stop_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Call ``handle`` on the event loop for each stop signal inside the block."""
    loop = asyncio.get_running_loop()
    # nohup means that SIGHUP does not end the run. SIGINT counts even if it was ignored before: a shell that starts a
    # command in the background does that, and who sends a SIGINT to such a run wants to stop it.
    hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    taken = [signum for signum in _STOP_SIGNALS if not (signum == signal.SIGHUP and hangup_ignored)]
    for signum in taken:
        loop.add_signal_handler(signum, handle, signum)
    try:
        yield
    finally:
        for signum in taken:
            loop.remove_signal_handler(signum)
