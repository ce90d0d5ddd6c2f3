"""The typed client of the GserverManager. It survives a manager that is restarted at another address.

    call ──exchange──> 200 ──> reply
      ^                 ├──> no server, no manager: wait, look the address up again, repeat ── up to a bound
      └─────────────────┘
                        └──> any other status: raise

Its calls are the rows of ``realsys.manager.operations``, which also says which of them may be repeated.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Generic

import msgspec

from realsys.cluster.failpoint import failpoint
from realsys.cluster.http_client import CallFailed, HttpClient
from realsys.cluster.lease import CheckAlive, unleased
from realsys.errors import MALFORMED, Fenced, GenerationError, RealsysError, StreamError, WaitTimeout
from realsys.manager import operations
from realsys.manager.messages import NoServer, OlderTrainer
from realsys.manager.operations import Operation, Reply, Request

log = logging.getLogger(__name__)

FIRST_DELAY_S, LAST_DELAY_S = 0.05, 1.0  # between tries; doubles


class RolloutSuperseded(RealsysError):
    """The manager has cancelled this attempt: its lease lapsed, or it was reissued. Not a failure of the rollout."""


class _Method(Generic[Request, Reply]):
    """An operation as a method of the client that takes its request."""

    def __init__(self, operation: Operation[Request, Reply]) -> None:
        self._operation = operation

    def __get__(self, client: ManagerClient, owner: type) -> Callable[[Request], Coroutine[Any, Any, Reply]]:
        return functools.partial(client.call, self._operation)


class _Query(Generic[Reply]):
    """An operation without a request as a method of the client."""

    def __init__(self, operation: Operation[None, Reply]) -> None:
        self._operation = operation

    def __get__(self, client: ManagerClient, owner: type) -> Callable[[], Coroutine[Any, Any, Reply]]:
        return functools.partial(client.call, self._operation, None)


class ManagerClient:
    """Calls of the RolloutWorkers and the master. All raise WaitTimeout when the manager stays away.

    allocate, touch, finish              of tickets and attempts
    schedule                             waits for a routable server; raises RolloutSuperseded when the attempt is
                                         over, GenerationError when no server becomes routable
    submit, claim, trained, devices, roll_back, evaluate, pin, unpin  raise Fenced for an older trainer, StreamError
                                         for a contradiction
    cancel_evaluation                    of a user's evaluation
    evaluation, data_position, status    read only
    """

    allocate = _Method(operations.ALLOCATE)
    schedule = _Method(operations.SCHEDULE)
    touch = _Method(operations.TOUCH)
    finish = _Method(operations.FINISH)
    submit = _Method(operations.SUBMIT)
    claim = _Method(operations.CLAIM)
    trained = _Method(operations.TRAINED)
    devices = _Method(operations.DEVICES)
    roll_back = _Method(operations.ROLL_BACK)
    evaluate = _Method(operations.EVALUATE)
    pin = _Method(operations.PIN)
    unpin = _Method(operations.UNPIN)
    cancel_evaluation = _Method(operations.CANCEL_EVALUATION)
    evaluation = _Method(operations.EVALUATION)
    data_position = _Query(operations.DATA_POSITION)
    status = _Query(operations.STATUS)

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
        """``resolve`` returns the manager's address: it runs in a thread, may wait, and raises RealsysError.

        ``retry_timeout_s`` bounds the wait for the manager, ``no_server_retry_timeout_s`` for a generation server,
        ``timeout_s`` one exchange without the time that the manager holds it. Every exchange calls ``check_alive``.
        """
        self._resolve = resolve
        self._http = HttpClient(token, check_alive=check_alive, faults=_fault)
        self._retry_timeout_s = retry_timeout_s
        self._no_server_retry_timeout_s = no_server_retry_timeout_s
        self._timeout_s = timeout_s
        self._url: str | None = None

    async def call(self, operation: Operation[Request, Reply], request: Request) -> Reply:
        """Run one operation; repeat it while manager or server are away, each up to its bound."""
        path = operation.url_path(request)
        clock = asyncio.get_running_loop().time
        away_since: float | None = None
        no_server_since: float | None = None
        delay = FIRST_DELAY_S
        while True:
            try:
                return self._decode(path, await self._exchange(operation, request), operation.reply)
            except CallFailed as error:
                failed = error
            now = clock()
            if failed.status == NoServer.status and operation is operations.SCHEDULE:
                away_since, no_server_since = None, no_server_since or now
                if now - no_server_since > self._no_server_retry_timeout_s:
                    waited = f"waited {self._no_server_retry_timeout_s:g} s for a generation server"
                    raise GenerationError(f"{waited}: {failed.reason}")
            elif failed.status == 0 or failed.status >= 500:
                if away_since is None:  # once per call, not per try
                    log.warning("gserver_manager %s: %s; trying again", path, failed)
                    away_since = now
                if now - away_since > self._retry_timeout_s:
                    waited = f"waited {self._retry_timeout_s:g} s for the gserver_manager to answer {path}"
                    raise WaitTimeout(f"{waited}: {failed}; see its log")
            else:
                raise _refusal(operation, path, failed)
            await asyncio.sleep(delay)  # no event says that a manager or a server is back
            delay = min(2 * delay, LAST_DELAY_S)

    async def close(self) -> None:
        await self._http.close()

    async def _exchange(self, operation: Operation[Request, Reply], request: Request) -> bytes:
        """Exchange once. Raises CallFailed, with status 0 if the manager cannot be reached; Fenced without a lease."""
        if self._url is None:
            try:
                self._url = await asyncio.to_thread(self._resolve)
            except Fenced:
                raise
            except (RealsysError, OSError) as error:
                raise CallFailed(str(error) or type(error).__name__) from error
        url = self._url + operation.url_path(request)
        total_s = self._timeout_s + operation.held_s(request)
        try:
            return await self._http.call(url, request if operation.is_post else None, total_s, self._timeout_s)
        except CallFailed as failed:
            if failed.status == 0:
                self._url = None  # it may have moved
            raise

    def _decode(self, path: str, payload: bytes, kind: type[Reply]) -> Reply:
        try:
            return msgspec.json.decode(payload, type=kind)
        except MALFORMED as error:
            raise StreamError(f"gserver_manager {path}: reply cannot be read: {error}") from error


def _refusal(operation: Operation[Any, Any], path: str, failed: CallFailed) -> RealsysError:
    if failed.status != OlderTrainer.status:
        return StreamError(f"gserver_manager {path}: {failed}")
    return Fenced(f"gserver_manager {path}: {failed.reason}") if operation.trainer else RolloutSuperseded(failed.reason)


def _fault(replied: bool) -> str:
    return failpoint("manager.reply") if replied else failpoint("manager.call")
