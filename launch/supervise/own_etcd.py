"""The etcd that a run starts for itself, seen from the launcher. The process: ``realsys.workers.name_store``."""

from __future__ import annotations

import asyncio

import grpc

from realsys.cluster.http_client import attempts
from realsys.cluster.names.etcd_members import EtcdAccess, import_etcd3
from realsys.errors import NameStoreError, WaitTimeout

_PERIOD_S = 0.05
_ATTEMPT_S = 2.0


async def etcd_answers(address: str, access: EtcdAccess, member: str, timeout_s: float) -> None:
    """Return when etcd at ``address`` lists ``member``, which takes a leader. Raises WaitTimeout.

    The etcd of another run may have taken the port. It is not used.
    """
    problem = ""
    async for _ in attempts(timeout_s, _PERIOD_S, _PERIOD_S):
        problem = await asyncio.to_thread(_problem, address, access, member, min(_ATTEMPT_S, timeout_s))
        if not problem:
            return
    limit = f"{timeout_s:g} s (cluster.connect_timeout_s)"
    raise WaitTimeout(f"etcd at {address} did not answer within {limit}: {problem}")


def _problem(address: str, access: EtcdAccess, member: str, timeout_s: float) -> str:
    """Return why etcd at ``address`` cannot be used yet; "" if it lists ``member``."""
    rpc = import_etcd3().etcdrpc
    try:
        with access.channel(address) as channel:
            members = rpc.ClusterStub(channel).MemberList(rpc.MemberListRequest(), timeout=timeout_s).members
    except grpc.RpcError as error:
        return str(error.details())
    except NameStoreError as error:
        return str(error)
    names = [each.name for each in members]
    return "" if member in names else f"it is the etcd of another run ({', '.join(names)})"
