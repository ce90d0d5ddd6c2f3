"""The loop of `realsys serve`: clients train and sample until the run is stopped."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from realsys.cluster.worker import WorkerContext
from realsys.serve.settings import read_settings

if TYPE_CHECKING:
    from realsys.train.master.run import MasterParts


async def serve(parts: MasterParts, ctx: WorkerContext, stop: asyncio.Event) -> None:
    """Serve clients until ``stop`` is set."""
    settings = read_settings(ctx.paths.serve)
    url = f"http://{ctx.config.cluster.host}:{settings.port}"
    await parts.status.show({"serve": {"url": url, "tenants": []}})
    await stop.wait()
