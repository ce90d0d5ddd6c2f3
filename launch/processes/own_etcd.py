"""The etcd that a run starts for itself, seen from the launcher. The process: ``realsys.workers.name_store``."""

from __future__ import annotations

from realsys.cluster.http.http_client import HttpClient, attempts
from realsys.errors import WaitTimeout

_PERIOD_S = 0.05
_ATTEMPT_S = 2.0


async def etcd_answers(address: str, timeout_s: float) -> None:
    """Return when etcd at ``address`` reports that it is healthy. Raises WaitTimeout."""
    async with HttpClient() as http:
        async for _ in attempts(timeout_s, _PERIOD_S, _PERIOD_S):
            if await http.answers(f"http://{address}/health", min(_ATTEMPT_S, timeout_s)):
                return
    raise WaitTimeout(f"etcd at {address} did not answer within {timeout_s:g} s (cluster.connect_timeout_s)")
