"""The etcd that a run starts for itself, seen from the launcher. The process: ``realsys.workers.name_store``."""

from __future__ import annotations

import asyncio

import grpc

from realsys.cluster.http.http_client import attempts
from realsys.cluster.store.etcd3_compat import import_etcd3
from realsys.cluster.store.etcd_members import EtcdAccess
from realsys.errors import NameStoreError, WaitTimeout

_PERIOD_S = 0.05
_ATTEMPT_S = 2.0


async def etcd_answers(address: str, access: EtcdAccess, member: str, timeout_s: float) -> None:
    """Return when etcd at ``address`` lists ``member``, which takes a leader. Raises WaitTimeout.

    The etcd of another run may have taken the port. It is not used.
    """
    async for _ in attempts(timeout_s, _PERIOD_S, _PERIOD_S):
        if member in await asyncio.to_thread(_members, address, access, min(_ATTEMPT_S, timeout_s)):
            return
    raise WaitTimeout(f"etcd at {address} did not answer within {timeout_s:g} s (cluster.connect_timeout_s)")


def _members(address: str, access: EtcdAccess, timeout_s: float) -> list[str]:
    """Return the names of the members of etcd at ``address``; [] if it does not answer, or has no certificate yet."""
    rpc = import_etcd3().etcdrpc
    try:
        with access.channel(address) as channel:
            members = rpc.ClusterStub(channel).MemberList(rpc.MemberListRequest(), timeout=timeout_s).members
    except (grpc.RpcError, NameStoreError):
        return []
    return [each.name for each in members]
