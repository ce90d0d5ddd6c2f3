"""The etcd that a run starts for itself, seen from the launcher. The process: ``realsys.workers.name_store``."""

from __future__ import annotations

import msgspec

from realsys.cluster.http.http_client import CallFailed, HttpClient, attempts
from realsys.errors import MALFORMED, WaitTimeout

_PERIOD_S = 0.05
_ATTEMPT_S = 2.0


class _Member(msgspec.Struct, frozen=True):
    name: str = ""


class _Members(msgspec.Struct, frozen=True):
    members: list[_Member] = []


async def etcd_answers(address: str, member: str, timeout_s: float) -> None:
    """Return when etcd at ``address`` lists ``member``, which takes a leader. Raises WaitTimeout.

    The etcd of another run may have taken the port. It is not used.
    """
    async with HttpClient() as http:
        async for _ in attempts(timeout_s, _PERIOD_S, _PERIOD_S):
            if member in await _members(http, address, min(_ATTEMPT_S, timeout_s)):
                return
    raise WaitTimeout(f"etcd at {address} did not answer within {timeout_s:g} s (cluster.connect_timeout_s)")


async def _members(http: HttpClient, address: str, timeout_s: float) -> list[str]:
    """Return the names of the members of etcd at ``address``; [] if it does not answer."""
    try:
        reply = await http.call(f"http://{address}/v3/cluster/member/list", {}, timeout_s)
        return [each.name for each in msgspec.json.decode(reply, type=_Members).members]
    except (CallFailed, *MALFORMED):
        return []
