"""The GenerationServer process: one engine behind HTTP, registered while it can serve.

It starts with the base model at version -1; the manager routes to it only after it has verified a published version.
A SGLang that was restarted has forgotten its weights: the server is then registered as a new incarnation, which is new
to the manager.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from realsys.cluster.worker import WorkerContext, worker_main

if TYPE_CHECKING:
    from realsys.generation.backend import Change, EngineParts, GenerationEngine
    from realsys.generation.server import HttpServer

log = logging.getLogger(__name__)

_HAND_OVER_S = 2.0


@dataclass(frozen=True, slots=True)
class Stop:
    """The process was asked to stop."""


def serve(ctx: WorkerContext) -> None:
    """Build the engine, serve until told to stop, close."""
    # torch after the arguments and the configuration are known to be right: it takes seconds.
    from realsys.errors import GenerationError
    from realsys.generation.backend import make_backend
    from realsys.generation.server import HttpServer, build_app

    changes: queue.SimpleQueue[Change | Stop] = queue.SimpleQueue()
    model_path = Path(ctx.config.model.path) if ctx.config.model.path else ctx.paths.model
    ctx.set_state("loading")
    engine = make_backend(ctx.config).build(_parts(ctx, model_path, changes.put))
    ctx.on_stop(lambda: changes.put(Stop()))
    try:
        engine.start()
    except GenerationError:
        if ctx.stop.is_set():
            return
        raise
    app = build_app(engine, token=ctx.token, check_alive=ctx.check_alive)
    ctx.count(lambda: app.refused)
    http = HttpServer(app, ctx.config.cluster.host)
    http.start(ctx.config.cluster.connect_timeout_s)
    log.info("serving %s at %s", model_path, http.url)
    try:
        _register_changes(ctx, http.url, changes)
    finally:
        stop_serving(engine, http)


def stop_serving(engine: GenerationEngine, http: HttpServer) -> None:
    """Hand over what the open answers have, so that they go on elsewhere, and close."""
    from realsys.errors import GenerationError

    with contextlib.suppress(GenerationError, TimeoutError):  # it has ended already, or hangs
        engine.pause("abort").result(_HAND_OVER_S)
    # The engine first: whoever asks now gets an error at once, and the HTTP server has nothing to do.
    engine.close()
    http.close()


def _register_changes(ctx: WorkerContext, url: str, changes: queue.SimpleQueue[Change | Stop]) -> None:
    """Keep the registration true until asked to stop. Raises GenerationError when the engine will not serve again."""
    import msgspec

    from realsys.errors import GenerationError
    from realsys.types import ServerAddress

    key = ctx.names.generation_server(ctx.index)
    while not isinstance(change := changes.get(), Stop):
        if change.final:
            raise GenerationError(f"{ctx.name}: {change.reason}")
        if change.serial is None:
            log.warning("not serving: %s", change.reason)
            ctx.check_alive()  # else it may be the registration of a successor
            ctx.store.clear_subtree(key)  # no error when it is not there
            ctx.set_state("restarting")
            continue
        incarnation = f"{ctx.incarnation}.{change.serial}" if change.serial else ctx.incarnation
        address = ServerAddress(ctx.name, url, os.getpid(), socket.gethostname(), incarnation)
        ctx.register(key, msgspec.json.encode(address).decode())
        ctx.set_state("serving")


def _parts(ctx: WorkerContext, model_path: Path, on_change: Callable[[Change], None]) -> EngineParts:
    """Collect what an engine is built from."""
    from realsys.generation.backend import EngineParts
    from realsys.weights.base import ReaderParts
    from realsys.weights.build import build
    from realsys.weights.folder import FolderWriter

    reader = build(ctx.config).reader(ReaderParts(ctx.index, model_path))
    folders = FolderWriter(reader, model_path, ctx.paths.root / f"staged-{ctx.index}")
    return EngineParts(
        config=ctx.config,
        model_path=model_path,
        index=ctx.index,
        load=reader.stage,
        materialise=folders.write,
        on_change=on_change,
        on_stop=ctx.on_stop,
    )


def main() -> None:
    worker_main("generation_server", serve)


if __name__ == "__main__":
    main()
