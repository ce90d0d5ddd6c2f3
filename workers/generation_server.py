"""The GenerationServer process: one embedded engine behind HTTP, registered once it can serve.

It starts with the base model at version -1; the manager routes to it only after it has verified a published version.
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from realsys.cluster.worker import WorkerContext, worker_main

log = logging.getLogger(__name__)


def serve(ctx: WorkerContext) -> None:
    """Build the engine, serve until told to stop, close."""
    # torch after the arguments and the configuration are known to be right: it takes seconds.
    import msgspec
    import torch

    from realsys.errors import ConfigError
    from realsys.generation.build import build_engine
    from realsys.generation.server import HttpServer, build_app
    from realsys.types import ServerAddress
    from realsys.weights.stage import StagedWeights, stage

    config = ctx.config
    generation = config.generation
    if generation.backend != "embedded":
        raise ConfigError("generation.backend", generation.backend, "cannot be served yet; set it to embedded")
    torch.set_num_threads(generation.threads)

    def load(path: str, version: int) -> StagedWeights:
        return stage(Path(path), version)

    model_path = Path(config.model.path) if config.model.path else ctx.paths.model
    ctx.set_state("loading")
    engine = build_engine(
        model_path,
        generation,
        load,
        max_prompt_tokens=config.data.max_prompt_tokens,
        dtype=getattr(torch, config.model.dtype),
        interruptible=config.asynchronous.interruptible,
    )
    http = HttpServer(build_app(engine), config.cluster.host)
    engine.start()
    http.start(config.cluster.connect_timeout_s)
    address = ServerAddress(ctx.name, http.url, os.getpid(), socket.gethostname(), ctx.incarnation)
    ctx.register(ctx.names.generation_server(ctx.index), msgspec.json.encode(address).decode())
    ctx.set_state("serving")
    log.info("serving %s at %s", model_path, http.url)
    ctx.stop.wait()
    # The engine first: whoever waits for an answer gets an error at once, and the HTTP server has nothing left to do.
    engine.close()
    http.close()


def main() -> None:
    worker_main("generation_server", serve)


if __name__ == "__main__":
    main()
