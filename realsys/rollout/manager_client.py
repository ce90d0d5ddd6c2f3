"""The RolloutWorker's calls to the GserverManager. Survives a manager that is restarted at another address.

A call that does not get through is made again, with the address looked up anew, for ``retry_timeout_s``. All three
calls may be repeated: finish and schedule by their nature; when the reply of an allocation is lost, the
lease of its tickets ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp
import msgspec

from realsys.cluster.failpoint import failpoint
from realsys.cluster.fence import CheckAlive, unleased
from realsys.cluster.http.http_client import open_session, read_reply
from realsys.errors import MALFORMED, Fenced, GenerationError, RealsysError, StreamError, WaitTimeout
from realsys.manager.messages import (
    AllocateReply,
    AllocateRequest,
    ClaimReply,
    ClaimRequest,
    DataPosition,
    EvaluateReply,
    EvaluateRequest,
    EvaluationReply,
    FinishReply,
    FinishRequest,
    RollBackReply,
    RollBackRequest,
    ScheduleReply,
    ScheduleRequest,
    TrainedReply,
    TrainedRequest,
)

log = logging.getLogger(__name__)

FIRST_DELAY_S, LAST_DELAY_S = 0.05, 1.0  # between tries; doubles
SCHEDULE = "/schedule_request"
OF_MASTER = (
    "/claim",
    "/trained",
    "/roll_back",
    "/evaluate",
)  # refused with 409 when a younger training side has started
NO_SERVER, SUPERSEDED = 503, 409

Reply = TypeVar("Reply")


class RolloutSuperseded(RealsysError):
    """The manager no longer wants this attempt: its lease lapsed, or it was re-issued. Not a failure of the rollout."""


class _Refusal(msgspec.Struct):
    error: str = ""


class ManagerClient:
    """``resolve`` gives the manager's address: run in a thread, it may wait; RealsysError means that there is none."""

    def __init__(
        self,
        resolve: Callable[[], str],
        token: str,
        *,
        retry_timeout_s: float = 120.0,
        no_server_retry_timeout_s: float = 600.0,
        timeout_s: float = 30.0,
        check_alive: CheckAlive = unleased,
    ) -> None:
        """``no_server_retry_timeout_s`` bounds the wait for a generation server, ``timeout_s`` one exchange without the
        time that the manager holds an allocation. ``check_alive`` is asked before every exchange.
        """
        self._resolve, self._check_alive = resolve, check_alive
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._retry_timeout_s, self._no_server_retry_timeout_s, self._timeout_s = (
            retry_timeout_s,
            no_server_retry_timeout_s,
            timeout_s,
        )
        self._session: aiohttp.ClientSession | None = None
        self._url: str | None = None

    async def allocate(self, request: AllocateRequest) -> AllocateReply:
        """Held by the manager up to ``request.wait_s``. Raises WaitTimeout when the manager stays away."""
        return await self._call("/allocate_rollout", request, AllocateReply, request.wait_s)

    async def schedule(self, request: ScheduleRequest) -> ScheduleReply:
        """The server to use next; waits while there is none.

        Raises RolloutSuperseded when the attempt is over, GenerationError when no server came, WaitTimeout when the
        manager stays away.
        """
        return await self._call(SCHEDULE, request, ScheduleReply)

    async def finish(self, request: FinishRequest) -> FinishReply:
        """Report the end of an attempt. Raises WaitTimeout when the manager stays away."""
        return await self._call("/finish_rollout", request, FinishReply)

    async def claim(self, request: ClaimRequest) -> ClaimReply:
        """Ask for the tickets of a batch before it is trained. Raises Fenced for an older incarnation."""
        return await self._call("/claim", request, ClaimReply)

    async def trained(self, request: TrainedRequest) -> TrainedReply:
        """Report what a step trained, or what was dropped before it. Raises Fenced for an older incarnation."""
        return await self._call("/trained", request, TrainedReply)

    async def roll_back(self, request: RollBackRequest) -> RollBackReply:
        """Before anything else of a training side that starts. The same incarnation again changes nothing.

        Raises Fenced when a younger one has started, StreamError when the ledger cannot go back to that version.
        """
        return await self._call("/roll_back", request, RollBackReply)

    async def evaluate(self, request: EvaluateRequest) -> EvaluateReply:
        """Start an evaluation; the same id again changes nothing. Raises Fenced for an older incarnation."""
        return await self._call("/evaluate", request, EvaluateReply)

    async def evaluation(self, eval_id: str) -> EvaluationReply:
        """How far an evaluation is."""
        return await self._call(f"/evaluate/{eval_id}", None, EvaluationReply)

    async def data_position(self) -> DataPosition:
        """Where in the data training is, for a checkpoint."""
        return await self._call("/data_position", None, DataPosition)

    async def status(self) -> dict[str, Any]:
        """What the status page shows."""
        return await self._call("/status", None, dict[str, Any])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(self, path: str, request: msgspec.Struct | None, kind: type[Reply], held_s: float = 0.0) -> Reply:
        """Consumes one reply; waits for manager and server, each up to its bound; any answer but "not now" ends it."""
        clock = asyncio.get_running_loop().time
        away_since: float | None = None
        no_server_since: float | None = None
        delay = FIRST_DELAY_S
        while True:
            try:
                status, payload = await self._exchange(path, request, held_s)
                problem = ""
            except Fenced:
                raise
            except (TimeoutError, aiohttp.ClientError, OSError, RealsysError) as error:
                self._url = None  # it may have moved
                status, payload, problem = 0, b"", str(error) or type(error).__name__
            if status == 200:
                return self._decode(path, payload, kind)
            now = clock()
            if status == NO_SERVER and path == SCHEDULE:
                away_since, no_server_since = None, no_server_since or now
                if now - no_server_since > self._no_server_retry_timeout_s:
                    waited = f"waited {self._no_server_retry_timeout_s:g} s for a generation server"
                    raise GenerationError(f"{waited}: {_reason(payload)}")
            elif status == 0 or status >= 500:
                problem = problem or f"status {status}: {_reason(payload)}"
                if away_since is None:  # once per call, not per try
                    log.warning("gserver_manager %s: %s; trying again", path, problem)
                    away_since = now
                if now - away_since > self._retry_timeout_s:
                    waited = f"waited {self._retry_timeout_s:g} s for the gserver_manager to answer {path}"
                    raise WaitTimeout(f"{waited}: {problem}; see its log")
            elif status == SUPERSEDED and path in OF_MASTER:
                raise Fenced(f"gserver_manager {path}: {_reason(payload)}")
            elif status == SUPERSEDED:
                raise RolloutSuperseded(_reason(payload))
            else:
                raise StreamError(f"gserver_manager {path}: status {status}: {_reason(payload)}")
            await asyncio.sleep(delay)  # nothing tells when a manager or a server is back
            delay = min(2 * delay, LAST_DELAY_S)

    async def _exchange(self, path: str, request: msgspec.Struct | None, held_s: float) -> tuple[int, bytes]:
        if self._url is None:
            self._url = await asyncio.to_thread(self._resolve)
        if self._session is None:
            self._session = open_session(self._headers)
        timeout = aiohttp.ClientTimeout(total=self._timeout_s + held_s, sock_connect=self._timeout_s)
        method, body = ("GET", None) if request is None else ("POST", msgspec.json.encode(request))
        fault = failpoint("manager.call")
        self._check_alive()
        if fault == "drop":
            raise ConnectionResetError("the request was lost")
        if fault == "garbage":
            body = b"{\xff"
        for _ in range(1 + (fault == "duplicate")):
            async with self._session.request(method, self._url + path, data=body, timeout=timeout) as response:
                status, payload = response.status, await read_reply(response)
        match failpoint("manager.reply"):
            case "drop":
                raise ConnectionResetError("the reply was lost")
            case "garbage":
                payload = b"{\xff"
        return status, payload

    def _decode(self, path: str, payload: bytes, kind: type[Reply]) -> Reply:
        try:
            return msgspec.json.decode(payload, type=kind)
        except MALFORMED as error:
            raise StreamError(f"gserver_manager {path}: reply cannot be read: {error}") from error


def _reason(payload: bytes) -> str:
    try:
        return msgspec.json.decode(payload, type=_Refusal).error or "no reason given"
    except MALFORMED:
        return payload[:200].decode("utf-8", "replace") or "no reason given"
