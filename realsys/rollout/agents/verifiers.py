"""The agent ``verifiers``: environments of that package, played by its environment server.

RolloutWorker                                            interpreter of verifiers (``env_python``)
  agent ──task, base_url──> server ──ZMQ, ipc──> environment server ──> harness, tools, reward
    ^                        └─ guard, restarts             │
    │ rows                                                  v
  gateway <──/chat/completions or /inference/v1/generate── model calls
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from realsys.cluster.children.child_process import Backoff, GuardedProcess
from realsys.cluster.stream.sockets import LoopReader, ZContext
from realsys.config.schema import Config
from realsys.data.sources.verifiers_tasks import KEY, interpreter, program, surroundings
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import AgentError, ConfigError, DataError
from realsys.rollout.agents.contract import AgentParts, Session
from realsys.rollout.environments import Task
from realsys.types import Episode

CLIENTS = ("chat", "tokens")
MODEL = "policy"  # name of the model in requests, as the gateway lists it
MOST_ENVIRONMENTS = 16  # servers of one RolloutWorker


@dataclass(kw_only=True)
class VerifiersOptions:
    """``rollout.agent_args``.

    env_python  interpreter that has verifiers; default: that of data.source_args
    client      ``chat``: the gateway renders messages; ``tokens``: verifiers does, with ``renderer``
    workers     processes of one environment server
    """

    env_python: str = ""
    client: str = "chat"
    renderer: Mapping[str, Any] | None = None
    workers: int = 1
    start_timeout_s: float = 300.0

    def python(self, config: Config) -> str:
        """Return the interpreter. Raises ConfigError if it is not found, or if another option is out of bounds."""
        field = "rollout.agent_args"
        if self.client not in CLIENTS:
            raise ConfigError(f"{field}.client", self.client, f"must be one of {', '.join(CLIENTS)}")
        if self.renderer and self.client != "tokens":
            raise ConfigError(f"{field}.renderer", dict(self.renderer), "needs client: tokens")
        if type(self.workers) is not int or not 1 <= self.workers <= 64:
            raise ConfigError(f"{field}.workers", self.workers, "must be an integer from 1 to 64")
        if not self.start_timeout_s > 0:
            raise ConfigError(f"{field}.start_timeout_s", self.start_timeout_s, "must be greater than 0")
        sources = [config.data.source_args, *(source.source_args for source in config.data.mixture)]
        of_data = next((args["env_python"] for args in sources if "env_python" in args), "")
        try:
            return interpreter(self.env_python or of_data)
        except DataError as error:
            raise ConfigError(f"{field}.env_python", self.env_python, str(error)) from None


@dataclass
class VerifiersAgent(VerifiersOptions):
    """Player of the tasks of ``data.train=verifiers:ENV``; one server for each environment in the data."""

    parts: AgentParts

    def __post_init__(self) -> None:
        """Check the options. Raises ConfigError."""
        self._python = self.python(self.parts.config)
        self._servers: dict[str, EnvironmentServer] = {}

    @staticmethod
    def check(config: Config, tokenizer: TextTokenizer, **options: Any) -> None:
        """Raise ConfigError for an option out of bounds, or an interpreter that does not exist."""
        VerifiersOptions(**options).python(config)

    async def run(self, task: Task, session: Session) -> Episode:
        """Play one episode. Raises AgentError if the environment failed or timed out: that is never a reward."""
        given = task.prompt.extra.get(KEY)
        if not isinstance(given, dict) or not isinstance(given.get("task"), dict):
            raise AgentError(f"the row has no key {KEY!r}: the agent verifiers plays tasks of data.train=verifiers:ENV")
        server = self._server(given["env"], given.get("args") or {})
        client = client_of(self.client, session.base_url, str(self.parts.tokenizer.path), self.renderer)
        outcome = await server.run(run_request(given["task"], client, MODEL))
        session.capture.exclude(outcome.ignored)
        rows = session.capture.rows()
        if not rows:
            raise AgentError("the environment called no model, so there is nothing to train")
        return Episode(rows, outcome.reward, None, {**session.capture.metrics(), **outcome.metrics})

    async def close(self) -> None:
        """End all servers."""
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    def _server(self, env: str, args: Mapping[str, Any]) -> EnvironmentServer:
        key = json.dumps([env, args], sort_keys=True)
        if key not in self._servers:
            if len(self._servers) >= MOST_ENVIRONMENTS:
                raise AgentError(f"the data names more than {MOST_ENVIRONMENTS} environments: train on fewer of them")
            environment = ServedEnvironment(env, args, self._python, self.workers, self.start_timeout_s)
            self._servers[key] = EnvironmentServer(environment)
        return self._servers[key]


# ---- protocol of the environment server of verifiers 0.4: requests, and the assembly of a run's result. No I/O
#
#     to the server    [request id, method, msgpack]        methods: health, run, cancel
#     from the server  [request id, "delta", msgpack]       changes of one trace, any number of them
#                      [request id, "reply", msgpack]       the end: {success, error, head, traces}
#
# A run has a trace for each agent of the environment that ran. Its rewards, metrics and errors come in deltas; the
# reply names the traces that count. The messages of a trace are ignored: the gateway has the tokens.
#
# `error-is-not-data`: a run with an error, a timeout or without any reward raises AgentError.


Record = dict[str, Any]
_SHOWN = 500  # characters of an error


@dataclass(frozen=True, slots=True)
class VerifiersOutcome:
    """Result of a run.

    reward   mean over the traces of trained agents; that of a trace is the sum of score times weight
    metrics  metrics and scores by name; after ``agent.`` if the environment has several agents
    ignored  ids of the traces whose tokens are not trained; model calls carry them in X-Session-ID
    """

    reward: float
    metrics: dict[str, float]
    ignored: frozenset[str] = frozenset()


def pack(payload: Mapping[str, Any]) -> bytes:
    return msgspec.msgpack.encode(dict(payload))


def unpack(data: bytes) -> Record:
    """Decode a message. Raises ValueError."""
    record = msgspec.msgpack.decode(data)
    if not isinstance(record, dict):
        raise ValueError(f"the environment server sent {type(record).__name__}: expected a map")
    return record


def client_of(kind: str, base_url: str, tokenizer: str, renderer: Mapping[str, Any] | None) -> Record:
    """Return the model client of a run. ``base_url`` names the episode, so there is no key.

    kind       ``chat``: messages go to the gateway; ``tokens``: verifiers renders them, and sends token ids
    tokenizer  folder with the tokenizer and chat template, for ``tokens``
    """
    # The name of a variable that is not set: the server takes keys from its environment only.
    client: Record = {"base_url": base_url, "api_key_var": "REALSYS_EPISODE_KEY"}
    if kind == "chat":
        return {**client, "type": "eval"}
    return {**client, "type": "train", "renderer_model_name": tokenizer, "renderer": renderer and dict(renderer)}


def run_request(task: Record, client: Record, model: str) -> bytes:
    """Return the payload of ``run``. The sampling settings are the gateway's."""
    return pack({"task_data": task, "client": client, "model": model, "sampling": {}})


@dataclass(slots=True)
class Assembly:
    """Traces of one run, from the deltas that have arrived."""

    traces: dict[str, Record] = field(default_factory=dict)

    def apply(self, delta: Record) -> None:
        """Add a change of a trace."""
        if delta.get("discard"):
            self.traces.pop(delta["trace"], None)
            return
        trace = self.traces.setdefault(delta["trace"], {"errors": []})
        trace["errors"] += delta.get("errors", [])
        trace.update(delta.get("set", {}))

    def outcome(self, reply: Record) -> VerifiersOutcome:
        """Return the result of the run that this reply ends. Raises AgentError."""
        if not reply.get("success"):
            raise AgentError(f"the environment server: {_short(reply.get('error') or 'no cause given')}")
        head, ids = reply["head"], [summary["id"] for summary in reply["traces"]]
        if missing := [name for name in ids if name not in self.traces]:
            raise AgentError(f"the environment server sent no trace {missing[0]} of an episode")
        traces = {name: self.traces[name] for name in ids}
        if problem := _problem(head, list(traces.values())):
            raise AgentError(problem)
        trained = [trace for trace in traces.values() if _agent(trace).get("trainable", True)]
        ignored = frozenset(name for name, trace in traces.items() if not _agent(trace).get("trainable", True))
        rewards = [trace["rewards"] for trace in trained if trace.get("rewards")]
        if not rewards:
            raise AgentError("the environment gave no reward: a task needs a function with @vf.reward")
        totals = [sum(one["score"] * one.get("weight", 1.0) for one in by_name.values()) for by_name in rewards]
        reward = sum(totals) / len(totals)
        if not math.isfinite(reward):
            raise AgentError(f"the environment gave the reward {reward}: it must be finite")
        return VerifiersOutcome(float(reward), _metrics(list(traces.values())), ignored)


def _problem(head: Record, traces: list[Record]) -> str:
    """Return why the run has no result; "" if it has one. The head fails with each of its traces."""
    failed = [record for record in (*traces, head) if record.get("is_timeout") or not record.get("ok")]
    if not failed:
        return ""
    causes = [_last_error(record) or record.get("stop_condition") or "" for record in failed]
    verb = "timed out" if any(record.get("is_timeout") for record in failed) else "failed"
    return f"the environment {verb}: {next(filter(None, causes), 'no cause given')}"


def _last_error(record: Record) -> str:
    errors = record.get("errors") or []
    return _short(f"{errors[-1].get('type')}: {errors[-1].get('message')}") if errors else ""


def _agent(trace: Record) -> Record:
    agent: Record = trace.get("agent") or {}
    return agent


def _metrics(traces: list[Record]) -> dict[str, float]:
    """Return metrics and scores by name; means over the traces of an agent that ran several times."""
    names = {_agent(trace).get("name", "agent") for trace in traces}
    values: dict[str, list[float]] = {}
    for trace in traces:
        prefix = f"{_agent(trace).get('name', 'agent')}." if len(names) > 1 else ""
        scores = {name: reward["score"] for name, reward in (trace.get("rewards") or {}).items()}
        for name, value in {**scores, **(trace.get("metrics") or {})}.items():
            values.setdefault(f"{prefix}{name}", []).append(float(value))
    return {name: sum(own) / len(own) for name, own in values.items()}


def _short(text: str) -> str:
    return " ".join(str(text).split())[-_SHOWN:]


# ---- one environment server: a process under the guard, the connection to it, and its restarts
#
#     absent ──first run──> starting ──health──> up ──exits──> absent      its runs fail with the cause
#                              └─ exits, or no answer in time ──> absent   so does the run that started it
#
# A start waits until the back-off after the last end has passed. When the budget of restarts is spent, every run fails
# at once with the last cause; the worker ends the run when that repeats (``rollout.group_player``).


log = logging.getLogger(__name__)

_RESTARTS = 5  # restarts in a row
_FIRST_DELAY_S = 1.0
_GRACE_S = 10.0  # time that the server has to end its harnesses, tools and sandboxes
_STOP_S = 25.0


@dataclass(frozen=True, slots=True)
class ServedEnvironment:
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

    def __init__(self, environment: ServedEnvironment) -> None:
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

    async def run(self, payload: bytes) -> VerifiersOutcome:
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

    async def _request(self, method: bytes, payload: bytes) -> VerifiersOutcome:
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
        return request.assembly.outcome(reply) if method == b"run" else VerifiersOutcome(0.0, {})

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

    def __init__(self, environment: ServedEnvironment) -> None:
        self._environment = environment
        self._backoff = Backoff(_RESTARTS, _FIRST_DELAY_S)
        self._connection: _Connection | None = None
        self._lock = asyncio.Lock()
        self._not_before: float | None = 0.0  # monotonic time of the next start; None: the restarts are spent
        self._cause = ""  # cause of the last end

    async def run(self, payload: bytes) -> VerifiersOutcome:
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
                if self._not_before is None:
                    raise self._refusal()
                await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
                self._connection = _Connection(self._environment)
            connection = self._connection
            try:
                await connection.health(self._environment.start_timeout_s)
            except AgentError as error:
                await self._end(connection, f"{error}: ")
                raise self._refusal() from None
            return connection

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
