"""The etcd that a run starts for itself, seen from the launcher. The process: ``realsys.workers.name_store``."""

from __future__ import annotations

import asyncio

import aiohttp

from realsys.errors import WaitTimeout

_LOOK_AGAIN_S = 0.05
_ATTEMPT_S = 2.0


async def etcd_answers(address: str, timeout_s: float) -> None:
    """Return when etcd at ``address`` says that it is healthy. Raises WaitTimeout."""
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as session:
            while not await _healthy(session, f"http://{address}/health"):  # noqa: ASYNC110 it sends no event
                await asyncio.sleep(_LOOK_AGAIN_S)
    except TimeoutError:
        problem = f"etcd at {address} did not answer within {timeout_s:g} s (cluster.connect_timeout_s)"
        raise WaitTimeout(problem) from None


async def _healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=_ATTEMPT_S)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
