"""The signals that ask a launcher or an agent to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

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
