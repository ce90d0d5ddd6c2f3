"""A generation engine as a service of its trial: registered in the name store while it serves, and only then.

    engine ──Change──> queue ──> Registration: register, withdraw, or end the process
    signal ──Stop────────┘

A SGLang that was restarted has lost its weights. The server then registers as a new incarnation, which the manager
treats as a new server: it loads and verifies the newest version before it routes to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
from dataclasses import dataclass

import msgspec

from realsys.cluster.http_server import HttpServer
from realsys.cluster.worker import WorkerContext
from realsys.errors import GenerationError
from realsys.generation.backend import Change, GenerationEngine
from realsys.types import ServerAddress

log = logging.getLogger(__name__)

_HAND_OVER_S = 2.0


@dataclass(frozen=True, slots=True)
class Stop:
    """Request to end the process."""


Changes = queue.SimpleQueue[Change | Stop]


def keep_registered(ctx: WorkerContext, url: str, changes: Changes, copies: str = "") -> None:
    """Keep the registration true until Stop. Raises GenerationError if the engine will not serve again."""
    key = ctx.names.generation_server(ctx.index)
    while not isinstance(change := changes.get(), Stop):
        if change.final:
            raise GenerationError(f"{ctx.name}: {change.reason}")
        if change.serial is None:
            log.warning("not serving: %s", change.reason)
            ctx.check_alive()  # without the lease this could be the registration of a successor
            ctx.store.clear_subtree(key)  # no error if the key is not there
            ctx.set_state("restarting")
            continue
        incarnation = f"{ctx.incarnation}.{change.serial}" if change.serial else ctx.incarnation
        address = ServerAddress(ctx.name, url, os.getpid(), socket.gethostname(), incarnation, copies)
        ctx.register(key, msgspec.json.encode(address).decode())
        ctx.set_state("serving")


def stop_serving(engine: GenerationEngine, http: HttpServer) -> None:
    """Return what the open completions have so far, so that other servers continue them; then close both."""
    with contextlib.suppress(GenerationError, TimeoutError):  # the engine has ended already, or hangs
        engine.pause("abort").result(_HAND_OVER_S)
    # The engine first: new calls then fail immediately, and the HTTP server has no replies to wait for.
    engine.close()
    http.close()
