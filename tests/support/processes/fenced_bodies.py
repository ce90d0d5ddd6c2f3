"""A MasterWorker that waits before it publishes, until there is a line on stdin. Its parts are those of the product.

``python -c "from tests.support.processes.fenced_bodies import run; run()" --trial-dir ...``
"""

import asyncio
import sys
from pathlib import Path

import numpy as np

from realsys.cluster.worker import WorkerContext, worker_main

DONE = "done"  # file that it writes after the publication


def go() -> None:
    assert sys.stdin.readline() == "go\n"


def publishes(ctx: WorkerContext) -> None:
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
        ctx.register(ctx.names.root + "/ready", "ready")
        await asyncio.to_thread(go)
        return [SaveWeightsReply([ShardInfo(path.name, file.size, file.checksum, {"w": tensor})])]

    model = ctx.paths.root / "hf"
    model.mkdir()
    weights = DiskPublisher(PublisherParts(ctx.paths.weights(), model, ctx.incarnation), keep=2)
    key = VersionKey(ctx.store, ctx.names.model_version(), check_alive=ctx.check_alive)
    publisher = Publisher(weights, WeightRanks(save), key, incarnation=ctx.incarnation)
    asyncio.run(publisher.publish(0, 0))
    (ctx.paths.root / DONE).touch()


def run() -> None:
    worker_main("tester", publishes)
