"""The GenerationServer process: one engine behind HTTP, registered while it can serve.

It starts with the base model at version -1; the manager routes to it only after it has verified a published version.
"""

from __future__ import annotations

import logging

from realsys.cluster.gpu_environment import bind_to_gpus
from realsys.cluster.worker import WorkerContext, worker_main

log = logging.getLogger(__name__)


def serve(ctx: WorkerContext) -> None:
    """Build the engine, serve until asked to stop, close."""
    if ctx.config.cluster.bind_cpus == "all":
        bind_to_gpus()
    # Imported here: torch takes seconds, and wrong arguments should not.
    from realsys.cluster.http_server import HttpServer
    from realsys.config.allocation import lent_servers
    from realsys.errors import GenerationError
    from realsys.generation.backend import EngineParts, make_backend, own_span
    from realsys.generation.lent import LentEngine
    from realsys.generation.server import Changes, StopServing, build_app, keep_registered, stop_serving
    from realsys.generation.weight_folder import FolderWriter
    from realsys.weights.contract import ReaderParts, build_transport
    from realsys.weights.host_reader import CopyService, HostReader

    config = ctx.config
    model_path = ctx.paths.base_model(config)
    ctx.set_state("loading")
    changes = Changes()
    reader, span = (
        build_transport(config).reader(ReaderParts(ctx.index, model_path, ctx.paths.root, ctx.token)),
        own_span(),
    )
    # The nodes of a server that spans several load from a folder that they share, not from the first one's memory.
    shared = ctx.paths.root / f"staged-{ctx.index}" if span.nodes > 1 else None
    parts = EngineParts(
        config=config,
        model_path=model_path,
        index=ctx.index,
        load=reader.stage,
        materialise=FolderWriter(reader, model_path, shared).write,
        on_change=changes.put,
        on_stop=ctx.on_stop,
        span=span,
        read=reader.read if isinstance(reader, HostReader) else None,
        write_adapters=reader.write_adapters if isinstance(reader, HostReader) else None,
    )
    build = make_backend(config).build
    engine = LentEngine(build, parts) if ctx.name in lent_servers(config) else build(parts)
    ctx.on_stop(lambda: changes.put(StopServing()))
    try:
        engine.start()
    except GenerationError:
        if ctx.stop.is_set():
            return
        raise
    copies = CopyService(reader, config, ctx.token, ctx.check_alive)
    app = build_app(engine, token=ctx.token, check_alive=ctx.check_alive, offer=copies.offer)
    ctx.count(lambda: app.refused)
    http = HttpServer(app, config.cluster.host)
    http.start(config.cluster.connect_timeout_s)
    log.info("serving %s at %s", model_path, http.url)
    try:
        keep_registered(ctx, http.url, changes, copies.url)
    finally:
        stop_serving(engine, http)
        copies.close()
        reader.close()


def main() -> None:
    worker_main("generation_server", serve)


if __name__ == "__main__":
    main()
