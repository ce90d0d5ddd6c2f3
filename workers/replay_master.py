"""The MasterWorker of a replay. `realsys replay` starts it in a scratch folder, with the
ModelWorkers of the trial.

It exits with 0 when the replay has run, whether its results are equal or not
(``realsys.train.master.replay``).
"""

from __future__ import annotations

import msgspec
import uvloop

from realsys.cluster.aio import run_until_stopped
from realsys.cluster.process import training_start
from realsys.cluster.stream.master_stream import MasterStream
from realsys.cluster.worker import WorkerContext, worker_main
from realsys.train.master.replay import replay
from realsys.types import TrainerAddress


async def serve(ctx: WorkerContext) -> None:
    stream = MasterStream(ctx.config.cluster.host)
    address = TrainerAddress(ctx.incarnation, stream.address, training_start())
    ctx.register(ctx.names.request_reply, msgspec.json.encode(address).decode())
    try:
        await run_until_stopped(ctx, replay(ctx, stream))
    finally:
        stream.close()


def main() -> None:
    worker_main("replay_master", lambda ctx: uvloop.run(serve(ctx)))


if __name__ == "__main__":
    main()
