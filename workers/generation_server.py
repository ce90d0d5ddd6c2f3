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
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from realsys.cluster.worker import WorkerContext, worker_main

if TYPE_CHECKING:
    from realsys.generation.backend import Change, GenerationEngine
    from realsys.generation.server import HttpServer
    from realsys.generation.sglang.update import Materialised
    from realsys.weights.stage import HeldWeights, StagedWeights

log = logging.getLogger(__name__)

_HAND_OVER_S = 2.0


@dataclass(frozen=True, slots=True)
class Stop:
    """The process was asked to stop."""


def serve(ctx: WorkerContext) -> None:
    """Build the engine, serve until told to stop, close."""
    # torch after the arguments and the configuration are known to be right: it takes seconds.
    from realsys.errors import GenerationError
    from realsys.generation.server import HttpServer, build_app

    changes: queue.SimpleQueue[Change | Stop] = queue.SimpleQueue()
    model_path = Path(ctx.config.model.path) if ctx.config.model.path else ctx.paths.model
    ctx.set_state("loading")
    build = _sglang if ctx.config.generation.backend == "sglang" else _embedded
    engine = build(ctx, model_path, changes.put)
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


def _embedded(ctx: WorkerContext, model_path: Path, on_change: Callable[[Change], None]) -> GenerationEngine:
    import torch

    from realsys.generation.backend import Change
    from realsys.generation.build import build_engine
    from realsys.weights.stage import stage

    generation, held = ctx.config.generation, _held(ctx)
    torch.set_num_threads(generation.threads)

    def load(path: str, version: int) -> StagedWeights:
        return stage(Path(path), version, held)

    engine = build_engine(
        model_path,
        generation,
        load,
        max_prompt_tokens=ctx.config.data.max_prompt_tokens,
        dtype=getattr(torch, ctx.config.model.dtype),
        interruptible=ctx.config.asynchronous.interruptible,
    )
    on_change(Change(0))  # the first news and the last: it lives as long as the process
    return engine


def _sglang(ctx: WorkerContext, model_path: Path, on_change: Callable[[Change], None]) -> GenerationEngine:
    from realsys.generation.sglang.build import build_sglang_engine

    overflow, held = ctx.paths.root / f"staged-{ctx.index}", _held(ctx)

    def materialise(source: Path, version: int, target: Path) -> Materialised:
        return write_verified(source, version, target, overflow, model_path, held)

    engine = build_sglang_engine(model_path, ctx.config, materialise, on_change, index=ctx.index)
    ctx.on_stop(engine.abandon_start)
    return engine


def _held(ctx: WorkerContext) -> HeldWeights:
    """What this server keeps of a version to read less of the next one; deltas need all of it."""
    from realsys.weights.stage import HeldWeights

    return HeldWeights(everything=ctx.config.weights.delta == "auto")


def write_verified(
    source: Path, version: int, target: Path, overflow: Path, model_path: Path, held: HeldWeights | None = None
) -> Materialised:
    """Write a version as a plain HF directory to ``target``, or to ``overflow`` when there is no room.

    What is written are the tensors in memory that were verified, in whatever form the version has on disk; ``held``:
    those of the version before, of which only what is new is read.
    Raises WeightsError when the version is not whole, OSError when it cannot be written.
    """
    from safetensors.torch import save_file

    from realsys.config.machine import Machine
    from realsys.generation.sglang.update import Materialised
    from realsys.weights.manifest import auxiliary_files
    from realsys.weights.stage import stage

    staged = stage(source, version, held)
    begin = time.perf_counter()
    size = sum(tensor.nbytes for tensor in staged.tensors.values())
    # Memory-backed storage promises more than there is: it counts what everybody may use.
    room = min(shutil.disk_usage(target.parent).free, Machine.here().memory_bytes)
    folder = target if size * 1.1 < room else overflow
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        save_file(staged.tensors, folder / "model.safetensors")
        for file in auxiliary_files(model_path):
            shutil.copy(file, folder)
    except BaseException:  # half a version must not go on filling the disk that it did not fit on
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Materialised(folder, {**staged.timings, "write_s": time.perf_counter() - begin})


def main() -> None:
    worker_main("generation_server", serve)


if __name__ == "__main__":
    main()
