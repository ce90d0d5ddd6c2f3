"""Workers that wait before an act that other processes see; a line on stdin lets each of them act.

``python -c "from tests.support.processes.fenced_bodies import run; run('pushes')" --trial-dir ...``. The parts are
those of the product; what each of them did can be seen in the trial folder or by a connected peer.
"""

import asyncio
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from realsys.cluster.worker import WorkerContext, worker_main

DONE = "done"  # file that a body writes after its act
#: modules imported before the worker starts: they take longer than a lease
HEAVY = {
    "generates": (
        "tests.support.serving.generation_models",
        "realsys.generation.embedded.engine",
        "realsys.generation.server",
    )
}


def run(name: str) -> None:
    bodies: dict[str, Callable[[WorkerContext], None]] = {
        "publishes": publishes,
        "pushes": pushes,
        "receives": receives,
        "manages": manages,
        "generates": generates,
    }
    for module in HEAVY.get(name, ()):
        importlib.import_module(module)
    worker_main("tester", bodies[name])


def ready(ctx: WorkerContext, value: str = "ready") -> None:
    ctx.register(ctx.names.root + "/ready", value)


def go() -> None:
    assert sys.stdin.readline() == "go\n"


def publishes(ctx: WorkerContext) -> None:
    """A MasterWorker whose ModelWorkers have written their shards."""
    from realsys.train.master.publish import Publisher, VersionKey
    from realsys.train.requests import SaveWeightsReply, SaveWeightsRequest
    from realsys.weights.contract import PublisherParts
    from realsys.weights.disk.manifest import ShardInfo, StoredPiece, TensorInfo
    from realsys.weights.disk.plain_folders import write_safetensors
    from realsys.weights.disk.transport import DiskPublisher
    from tests.support.streams.weight_ranks import WeightRanks

    async def save(request: SaveWeightsRequest) -> list[SaveWeightsReply]:
        path = Path(request.plan.directory) / "model-00001-of-00001.safetensors"
        data = np.zeros(16, np.uint8)
        file, starts = write_safetensors(path, {"w": ("F32", [4], 16)}, lambda name: data)
        piece = StoredPiece(path.name, starts["w"], 16, "0" * 16, folder=path.parent.name.removesuffix(".tmp"))
        tensor = TensorInfo("F32", [4], "0" * 16, [piece])
        ready(ctx)
        await asyncio.to_thread(go)
        return [SaveWeightsReply([ShardInfo(path.name, file.size, file.checksum, {"w": tensor})])]

    model = ctx.paths.root / "hf"
    model.mkdir()
    weights = DiskPublisher(PublisherParts(ctx.paths.weights(), model, ctx.incarnation), keep=2)
    key = VersionKey(ctx.store, ctx.names.model_version(), check_alive=ctx.check_alive)
    publisher = Publisher(weights, WeightRanks(save), key, incarnation=ctx.incarnation)
    asyncio.run(publisher.publish(0, 0))
    (ctx.paths.root / DONE).touch()


def pushes(ctx: WorkerContext) -> None:
    """A RolloutWorker with a finished group; connected, so that nothing but the sending is left to do."""
    from realsys.cluster.stream.push_pull import Pusher
    from tests.support.streams.stream_parts import make_group

    async def body() -> None:
        address = ctx.store.get(ctx.names.pull(0))
        pusher = Pusher(lambda dp: address, [0], ctx.name, check_alive=ctx.check_alive)
        await pusher.push(make_group("before"))
        ready(ctx)
        await asyncio.to_thread(go)
        await pusher.push(make_group("after"))
        await pusher.close()

    asyncio.run(body())
    (ctx.paths.root / DONE).touch()


def receives(ctx: WorkerContext) -> None:
    """A DP head: stores each group, acknowledges it, and notifies the master."""
    from realsys.cluster.stream.push_pull import Puller
    from realsys.cluster.stream.worker_endpoint import GroupIntake, WorkerEndpoint
    from realsys.types import Group

    def store(group: Group) -> None:
        (ctx.paths.root / f"stored {group.ticket.ticket_id}").touch()

    puller = Puller(check_alive=ctx.check_alive)
    master = ctx.store.get(ctx.names.request_reply)
    endpoint = WorkerEndpoint(0, master, GroupIntake(puller, store), check_alive=ctx.check_alive)
    endpoint.wait_connected(60)
    ready(ctx, puller.address)
    ctx.stop.wait()
    endpoint.close()


def manages(ctx: WorkerContext) -> None:
    """A GserverManager."""
    from realsys.cluster.aio import stop_event
    from realsys.manager.process import Manager, ManagerParts

    async def body() -> None:
        parts = ManagerParts(
            config=ctx.config,
            names=ctx.names,
            store=ctx.store,
            token=ctx.token,
            ledger=ctx.paths.ledger,
            split_sizes={"train": 64},
            register=lambda address: ready(ctx, address),
            check_alive=ctx.check_alive,
            count=ctx.count,
        )
        await Manager(parts).run(stop_event(ctx))

    asyncio.run(body())


def generates(ctx: WorkerContext) -> None:
    """A GenerationServer with the embedded engine."""
    from realsys.cluster.http_server import HttpServer
    from realsys.config.schema import EmbeddedConfig, GenerationConfig
    from realsys.generation.embedded.engine import build_engine
    from realsys.generation.server import build_app
    from realsys.weights.disk.stage import DiskReader
    from tests.support.serving.generation_models import make_model

    model = ctx.paths.root / "hf"
    make_model("qwen2", model)
    config = GenerationConfig(embedded=EmbeddedConfig(max_running=4, max_queued=12, context_length=64))
    engine = build_engine(model, config, DiskReader().stage)
    engine.start()
    app = build_app(engine, token=ctx.token, check_alive=ctx.check_alive)
    ctx.count(lambda: app.refused)
    http = HttpServer(app)
    http.start()
    ready(ctx, http.url)
    ctx.stop.wait()
    engine.close()
    http.close()
