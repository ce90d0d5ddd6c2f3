"""One environment server: a process under the guard, the connection to it, and its restarts.

    absent ──first run──> starting ──health──> up ──exits──> absent      its runs fail with the cause
                             └─ exits, or no answer in time ──> absent   so does the run that started it

A start waits until the back-off after the last end has passed. When the budget of restarts is spent, every run fails at
once with the last cause; the worker ends the run when that repeats (``defects``).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from realsys.cluster.children.child_process import Backoff
from realsys.cluster.children.guarded_process import GuardedProcess
from realsys.cluster.stream.sockets import LoopReader, ZContext
from realsys.data.sources.verifiers_tasks import program, surroundings
from realsys.errors import AgentError
from realsys.rollout.agents.verifiers.wire import Assembly, Outcome, Record, pack, unpack

log = logging.getLogger(__name__)

_RESTARTS = 5  # restarts in a row
_FIRST_DELAY_S = 1.0
_GRACE_S = 10.0  # time that the server has to end its harnesses, tools and sandboxes
_STOP_S = 25.0


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment and the process that serves it.

    env, args  id of the taskset, and the environment's configuration
    python     interpreter that has verifiers
    workers    processes that share the episodes
    """

    env: str
    args: Mapping[str, Any]
    python: str
    workers: int = 1
    start_timeout_s: float = 300.0


@dataclass(slots=True)
class _Request:
    """A request that waits for its reply."""

    reply: asyncio.Future[Record]
    assembly: Assembly = field(default_factory=Assembly)


class _Connection:
    """One run of the server, from its start to its end."""

    def __init__(self, environment: Environment) -> None:
        """Start the process. Raises OSError."""
        self.started = time.monotonic()
        # A short path, because that of a socket is limited; and no other user can read the folder.
        self._folder = Path(tempfile.mkdtemp(prefix="realsys-verifiers-", dir="/tmp"))
        address = f"ipc://{self._folder}/server"
        settings = {"env": environment.env, "args": dict(environment.args), "address": address}
        command = program(environment.python, "serve", {**settings, "workers": environment.workers})
        name = f"environment server {environment.env}"
        self.process = GuardedProcess(
            name, command, surroundings(environment.python), self._folder, ["--grace", str(_GRACE_S)]
        )
        self._numbers = itertools.count()
        self._waiting: dict[bytes, _Request] = {}
        self._context: ZContext = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.connect(address)
        self._healthy = False
        self._lost = ""  # why no reply will come
        self._reader = LoopReader(self._socket, self._receive, lambda error: self._lose(f"{name}: {error}"))
        self.process.ended.add_done_callback(lambda _: self._lose(f"{name} ended"))

    @property
    def up(self) -> bool:
        return not self._lost

    async def health(self, timeout_s: float) -> None:
        """Return when the server has answered once. Raises AgentError if it ends before, or does not in time."""
        if self._healthy:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._request(b"health", pack({}))
        except TimeoutError:
            raise AgentError(f"no answer within {timeout_s:g} s") from None
        self._healthy = True

    async def last_words(self) -> str:
        """Return how the server ended, or why it is no longer used."""
        return self._lost if not self.process.ended.done() and self._lost else await self.process.last_words()

    async def run(self, payload: bytes) -> Outcome:
        """Run one episode. If this call is cancelled, so is the episode."""
        return await self._request(b"run", payload)

    async def close(self) -> None:
        """End the server with all its processes."""
        await self.process.stop(_STOP_S)
        self._lose("the environment server is closed")
        self._reader.close()
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)  # the guard may have been killed before it did this

    async def _request(self, method: bytes, payload: bytes) -> Outcome:
        number = b"%d" % next(self._numbers)
        request = _Request(asyncio.get_running_loop().create_future())
        self._waiting[number] = request
        try:
            self._send(number, method, payload)
            reply = await request.reply
        except asyncio.CancelledError:
            if self.up:  # the reply to it is ignored
                self._send(b"cancel %s" % number, b"cancel", pack({"request_id": number.decode()}))
            raise
        finally:
            self._waiting.pop(number, None)
        return request.assembly.outcome(reply) if method == b"run" else Outcome(0.0, {})

    def _send(self, *frames: bytes) -> None:
        self._socket.send_multipart(list(frames), zmq.NOBLOCK)
        self._reader.nudge()

    def _receive(self, frames: list[zmq.Frame]) -> None:
        number, kind, data = (frame.bytes for frame in frames)
        request = self._waiting.get(number)
        if request is None or request.reply.done():
            return
        if kind == b"delta":
            request.assembly.apply(unpack(data))
        else:
            request.reply.set_result(unpack(data))

    def _lose(self, problem: str) -> None:
        self._lost = self._lost or problem
        for request in self._waiting.values():
            if not request.reply.done():
                request.reply.set_exception(AgentError(problem))


class EnvironmentServer:
    """The server of one environment. It starts with the first run, and again after its end."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._backoff = Backoff(_RESTARTS, _FIRST_DELAY_S)
        self._connection: _Connection | None = None
        self._lock = asyncio.Lock()
        self._not_before: float | None = 0.0  # monotonic time of the next start; None: the restarts are spent
        self._cause = ""  # cause of the last end

    async def run(self, payload: bytes) -> Outcome:
        """Run one episode. Raises AgentError with the cause if the environment, or its server, failed."""
        connection = await self._connected()
        try:
            return await connection.run(payload)
        except AgentError:
            if connection.process.ended.done():
                raise AgentError(await connection.process.last_words()) from None
            raise

    @property
    def pid(self) -> int | None:
        """Pid of the guard of the running server; None if there is none."""
        return self._connection.process.pid if self._connection is not None and self._connection.up else None

    async def close(self) -> None:
        """End the server."""
        async with self._lock:
            if self._connection is not None:
                await self._connection.close()
                self._connection = None

    async def _connected(self) -> _Connection:
        """Return the connection to a server that answers, started if necessary. Raises AgentError."""
        async with self._lock:
            if self._connection is not None and not self._connection.up:
                await self._end(self._connection)
            if self._connection is None:
                await self._may_start()
                self._connection = _Connection(self._environment)
            connection = self._connection
            try:
                await connection.health(self._environment.start_timeout_s)
            except AgentError as error:
                await self._end(connection, f"{error}: ")
                raise self._refusal() from None
            return connection

    async def _may_start(self) -> None:
        """Wait for the back-off. Raises AgentError if the restarts are spent."""
        if self._not_before is None:
            raise self._refusal()
        await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))

    async def _end(self, connection: _Connection, problem: str = "") -> None:
        """Remove a server that has ended or does not answer, and set the time of the next start."""
        self._cause = f"{problem}{await connection.last_words()}"
        log.warning("%s", self._cause)
        await connection.close()
        self._connection = None
        delay_s = self._backoff.next_delay(time.monotonic() - connection.started)
        self._not_before = None if delay_s is None else time.monotonic() + delay_s

    def _refusal(self) -> AgentError:
        problem = f"environment {self._environment.env} cannot be served"
        return AgentError(f"{problem}: {self._cause}", defect=problem)
