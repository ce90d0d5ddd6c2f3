"""SGLang's processes of one node, of a server that spans nodes. The first node has the server (engine.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from realsys.cluster.network import free_ports, join_host_port
from realsys.errors import GenerationError
from realsys.generation.sglang.arguments import LOOPBACK, Launch
from realsys.generation.sglang.child import SglangProcess
from realsys.generation.sglang.keeper import scratch_folder


async def run_part(launch: Launch, on_stop: Callable[[Callable[[], None]], None]) -> None:
    """Run SGLang until it ends, which raises GenerationError, or until the process gets a signal to stop."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_soon() -> None:
        loop.call_soon_threadsafe(stopped.set)

    on_stop(stop_soon)
    [port] = free_ports(1)
    url = f"http://{join_host_port(LOOPBACK, port)}"
    child = SglangProcess(launch.command(port), launch.environment(), url, scratch_folder())
    stopping = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({child.ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stopped.is_set():
            raise GenerationError(f"SGLang {child.ended.result()}; its last lines: {child.tail()}")
    finally:
        stopping.cancel()
        await child.stop()
