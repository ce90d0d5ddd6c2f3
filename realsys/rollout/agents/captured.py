"""The agent that plays a user's ``run(data, base_url, api_key, http_client)``: what the gateway records is its episode.

row of the dataset ──> run ──base_url──> gateway ──> Capture ──rows──┐
                        └─reward, dict or None──> RunOutcome ───────> Episode
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import numbers
import os
import reprlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import numpy as np

from realsys.agent_runner import BOOT
from realsys.agent_runner.contract import CapturedRun, Failed
from realsys.agent_runner.runner import MAX_MESSAGE
from realsys.cluster.children.child_process import LAST_WORDS, SocketChild, how_it_ended, is_logged
from realsys.config.schema_rollout import RolloutConfig
from realsys.data.prompts import Prompt
from realsys.errors import AgentError, ConfigError
from realsys.rollout.agents.contract import PLACES, AgentParts, EpisodeTime, Session
from realsys.rollout.environments import Judgement, Task
from realsys.types import Episode


class AgentRuns(Protocol):
    """Caller of a user's ``run``."""

    def __call__(self, data: dict[str, Any], base_url: str, api_key: str, time: EpisodeTime) -> Awaitable[Any]:
        """Return what ``run`` returns. ``time`` starts when ``run`` does."""
        ...

    async def close(self) -> None: ...


class CapturedAgent:
    """Agent with ``base_url``."""

    def __init__(self, parts: AgentParts, runs: AgentRuns) -> None:
        self._parts = parts
        self._runs = runs

    async def run(self, task: Task, session: Session) -> Episode:
        """Play one episode. Raises AgentError, the exceptions of ``run``, and errors of the engine.

        `error-is-not-data`: an agent may hide an error of the engine, or die of it; both are that error.
        """
        time = EpisodeTime(self._parts.config.rollout.agent_limits.episode_timeout_s)
        try:
            returned = await self._runs(data_of(task.prompt), session.base_url, session.api_key, time)
        except Exception as error:
            raise session.capture.error or error from None
        if session.capture.error is not None:
            raise session.capture.error
        outcome = outcome_of(returned)
        rows = session.capture.rows(outcome.rewards)
        if not rows:
            raise AgentError("run received no completion from base_url, so there is nothing to train")
        judgement = await time.bound(self._judgement(task, session, outcome))
        metrics = session.capture.metrics() | judgement.metrics
        return Episode(rows, judgement.reward, judgement.correct, metrics, judgement.answer)

    async def close(self) -> None:
        """End the processes of the agent, and its HTTP client."""
        await self._runs.close()

    async def _judgement(self, task: Task, session: Session, outcome: RunOutcome) -> Judgement:
        if outcome.reward is not None:
            return Judgement(outcome.reward, outcome.correct, dict(outcome.metrics), answer=outcome.answer)
        judgement = await self._parts.environment.judge(task, session.capture.last())
        correct = judgement.correct if outcome.correct is None else outcome.correct
        answer = judgement.answer if outcome.answer is None else outcome.answer
        return Judgement(judgement.reward, correct, judgement.metrics | outcome.metrics, answer=answer)


def data_of(prompt: Prompt) -> dict[str, Any]:
    """Return the row of the dataset: ``prompt`` is a text, or messages as plain dicts."""
    return {**prompt.extra, "prompt": prompt.messages or prompt.text, "answer": prompt.answer}


# ---- result of a user's ``run``: a reward, a dict, or None. Pure


_KEYS = ("reward", "rewards", "correct", "metrics", "answer")
_RESULT = "run must return a reward, a dict, or None"


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Result of an episode.

    reward   None: the environment judges the last completion
    rewards  id of a completion -> reward for its last token, in addition to ``reward``
    """

    reward: float | None = None
    correct: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    rewards: dict[str, float] = field(default_factory=dict)


def outcome_of(returned: Any) -> RunOutcome:
    """Read what ``run`` returned. Raises AgentError with the problem in one line.

    A dict with other keys than those of RunOutcome maps ids of completions to rewards.
    """
    if returned is None:
        return RunOutcome()
    if isinstance(returned, bool | np.bool_):
        return RunOutcome(float(returned), bool(returned))
    if _is_number(returned):
        return RunOutcome(float(returned))
    if not isinstance(returned, Mapping):
        raise AgentError(f"run returned {reprlib.repr(returned)}: {_RESULT}")
    known = [key for key in returned if key in _KEYS]
    if not known:
        return RunOutcome(0.0 if returned else None, rewards=_rewards(returned))
    if unknown := [key for key in returned if key not in _KEYS]:
        raise AgentError(f"run returned a dict with the key {unknown[0]!r}: use {', '.join(_KEYS)}")
    reward, rewards = returned.get("reward"), _rewards(returned.get("rewards") or {})
    if reward is None and rewards:
        reward = 0.0
    if reward is not None and not _is_number(reward):
        raise AgentError(f"run returned the reward {reprlib.repr(reward)}: it must be a number or None")
    correct, metrics = returned.get("correct"), returned.get("metrics") or {}
    return RunOutcome(None if reward is None else float(reward), correct, metrics, returned.get("answer"), rewards)


def _rewards(by_id: Any) -> dict[str, float]:
    if not isinstance(by_id, Mapping) or not all(isinstance(key, str) for key in by_id):
        raise AgentError(f"run returned the rewards {reprlib.repr(by_id)}: they must be numbers by id of a completion")
    for key, value in by_id.items():
        if not _is_number(value):
            raise AgentError(f"run returned {reprlib.repr(value)} for {key!r}: it must be a number")
    return {key: float(value) for key, value in by_id.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real | np.number)


# ---- episodes inside of the RolloutWorker: on its event loop, or in a thread


class Inside:
    """Runs of an agent in this process. All episodes share one HTTP client.

    An async run shares the event loop with the RolloutWorker, so it must not block (``BlockedWatch``). A run that is
    not async has a thread; a thread that does not end cannot be killed, and keeps its place.
    """

    def __init__(self, loaded: Any, rollout: RolloutConfig) -> None:
        self._timeout_s = rollout.agent_limits.episode_timeout_s
        self._run = CapturedRun(loaded, rollout.agent_args, self._timeout_s)
        self._client: Any = None
        logging.getLogger("httpx").setLevel(logging.WARNING)  # one line per request, with the key of the episode
        self._watch: BlockedWatch | None = None
        self._places = asyncio.Semaphore(PLACES)  # threads of plain functions
        self._taken = 0.0  # time at which the last place was taken

    async def __call__(self, data: dict[str, Any], base_url: str, api_key: str, time: EpisodeTime) -> Any:
        """Return what ``run`` returns. Raises AgentError if it takes too long, and its exceptions."""
        if self._run.is_async:
            return await time.bound(self._call(data, base_url, api_key))
        client = self._shared()
        await self._take_place()
        return await time.bound(_result(self._thread(data, base_url, api_key, client)))

    async def close(self) -> None:
        """Close the HTTP client."""
        if self._watch is not None:
            self._watch.close()
        if self._client is not None:
            await self._client.aclose() if self._run.is_async else self._client.close()

    async def _call(self, data: dict[str, Any], base_url: str, api_key: str) -> Any:
        if self._watch is None and threading.current_thread() is threading.main_thread():
            self._watch = BlockedWatch()
        client = self._shared()
        in_agent.set(True)
        return await self._run.call(data, base_url, api_key, client)

    async def _take_place(self) -> None:
        """Wait for a thread; the time of the episode starts later. Raises AgentError if no thread ends in its time."""
        loop = asyncio.get_running_loop()
        while True:
            begin = loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await self._places.acquire()
                    self._taken = loop.time()
                    return
            if self._taken <= begin:
                problem = f"none of its threads ended within rollout.agent_limits.episode_timeout_s={self._timeout_s:g}"
                raise AgentError(f"{problem}: set rollout.agent_process=always", defect="threads")

    def _thread(self, *arguments: Any) -> Future[Any]:
        """Start a run. Its thread returns the place when it ends; the exit of the process does not wait for it."""
        ended: Future[Any] = Future()
        ended.set_running_or_notify_cancel()  # it cannot be cancelled
        loop = asyncio.get_running_loop()

        def work() -> None:
            try:
                ended.set_result(self._run.call(*arguments))
            except (Exception, SystemExit, asyncio.CancelledError) as error:  # the user's code may raise anything
                ended.set_exception(error)
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(self._places.release)

        try:
            threading.Thread(target=work, name="agent", daemon=True).start()
        except RuntimeError:  # no thread can be started
            self._places.release()
            raise
        return ended

    def _shared(self) -> Any:
        if self._client is None:  # on the event loop, to which it belongs
            self._client = self._run.make_client()
        return self._client


async def _result(ended: Future[Any]) -> Any:
    return await asyncio.wrap_future(ended)


# ---- watch over async agents in the RolloutWorker: one that blocks the event loop fails alone
#
#     thread ──tick──> event loop ──answer──> thread
#        └─ no answer for too long: SIGUSR2 ──> handler in the main thread ──AgentError──> inside of the agent's code
#
# The handler raises only if the code of an agent is running: in its context, which the tasks that it starts inherit.
# Code that holds the interpreter without running Python, such as a long matrix product, is interrupted when it
# returns.


BLOCKED_S = 10.0  # the other episodes stand still for this time, and the manager's lease on their tickets is longer
_TICKS = 10  # ticks in ``BLOCKED_S``

in_agent: ContextVar[bool] = ContextVar("in_agent", default=False)  # True in the code of agents


class BlockedWatch:
    """Watch of the event loop that runs when it is started, in the main thread."""

    def __init__(self) -> None:
        self._blocking_s = BLOCKED_S
        self._stop = threading.Event()
        self._missed = 0  # ticks without an answer; counted, because a suspended process has missed none
        self._before = signal.signal(signal.SIGUSR2, self._interrupt)
        self._thread = threading.Thread(target=self._watch, args=(asyncio.get_running_loop(),), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()
        signal.signal(signal.SIGUSR2, self._before)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stop.wait(self._blocking_s / _TICKS):
            self._missed += 1
            if self._missed > _TICKS:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
            try:
                loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # the event loop is closed
                return

    def _answer(self) -> None:
        self._missed = 0

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        if not in_agent.get() or self._missed <= _TICKS:
            return
        self._missed = 0
        problem = f"it blocked the RolloutWorker for more than {self._blocking_s:g} s"
        raise AgentError(f"{problem}: await what takes long, or set rollout.agent_process=always", defect="blocked")


# ---- episodes of a user's agent in separate processes: the side of the RolloutWorker
#
# Inside: ``realsys.agent_runner``.


log = logging.getLogger(__name__)

_START_S = 300.0  # bound on the imports of an agent
_PASS_S = 60.0  # bound on the wait for a zygote to take an episode
_RETRY_S = 0.01
_KILL_S = 5.0
#: processes of an episode at a time: its limit on memory allows no more of them, and a fork bomb has more at once
MAX_PROCESSES = 64
_MAX_REPLY = 4 << 20

_REACHED = {
    "memory": "its processes allocated more than twice rollout.agent_limits.memory_mb={memory_mb}",
    "processes": "it had more than {processes} processes",
    "result": "run returned more than 1 MiB",
    "start": "its process could not be started",
}


class AgentProcesses:
    """Runs of an agent, each in a separate process. Starts the zygote at the first run."""

    def __init__(self, rollout: RolloutConfig) -> None:
        self._rollout = rollout
        self._limits = {**rollout.agent_limits.model_dump(), "processes": MAX_PROCESSES}
        self._places = asyncio.Semaphore(PLACES)
        self._starting = asyncio.Lock()
        self._zygote: _Zygote | None = None
        self._talks = 0  # episodes that printed something

    async def __call__(self, data: dict[str, Any], base_url: str, api_key: str, time: EpisodeTime) -> Any:
        """Return what ``run`` returns. Raises AgentError: of ``run``, or if it reached a limit or ended its process."""
        async with self._places:
            task = {"data": data, "base_url": base_url, "api_key": api_key}
            connection = await self._connect()
            return self._result(await time.bound(_exchange(connection, json.dumps(task).encode())))

    async def close(self) -> None:
        """End all processes."""
        if self._zygote is not None:
            await self._discard(self._zygote)

    async def _discard(self, zygote: _Zygote) -> None:
        if self._zygote is zygote:  # an earlier episode may have replaced it
            self._zygote = None
            await zygote.kill()

    async def _connect(self) -> socket.socket:
        """Return a connection to a new keeper. A zygote that ended or hangs is replaced once. Raises AgentError."""
        for _ in range(2):
            zygote = await self._started()
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    await zygote.pass_on(theirs, self._limits)
            except OSError:
                ours.close()
                await self._discard(zygote)
                continue
            ours.setblocking(False)
            return ours
        raise AgentError("the process that starts its episodes ended or hung twice: see the log of the RolloutWorker")

    async def _started(self) -> _Zygote:
        rollout = self._rollout
        async with self._starting:
            if self._zygote is None:
                zygote, timeout_s = _Zygote(rollout), rollout.agent_limits.episode_timeout_s
                try:
                    await zygote.open({"agent": rollout.agent, "arguments": rollout.agent_args, "timeout_s": timeout_s})
                except BaseException:
                    await zygote.kill()
                    raise
                self._zygote = zygote
            return self._zygote

    def _result(self, reply: dict[str, Any]) -> Any:
        printed = " ".join(reply["printed"].split())[-LAST_WORDS:]
        if printed:
            self._log(reply["bytes"], printed)
        said = f"; it printed: {printed}" if printed else ""
        if reply["reached"] in _REACHED:
            problem = _REACHED[reply["reached"]].format(**self._limits)
            raise AgentError(f"{problem}{said}", defect=problem)
        if "failed" in reply:
            failed = Failed(reply["failed"])
            raise AgentError(f"{failed.in_words()}{said}", defect=f"{failed['type']} at {failed['place']}")
        if "returned" not in reply:
            problem = f"its process {how_it_ended(reply['code'])} before run returned"
            raise AgentError(f"{problem}{said}", defect=problem)
        return reply["returned"]

    def _log(self, size: int, printed: str) -> None:
        self._talks += 1
        if is_logged(self._talks):
            log.info("episode %d of the agent's processes printed %d bytes, the last: %s", self._talks, size, printed)


class _Zygote:
    """The process that has imported the agent."""

    def __init__(self, rollout: RolloutConfig) -> None:
        """Start it, on the running event loop. Raises AgentError."""
        self._sending = asyncio.Lock()
        argv = _command(rollout)
        try:
            self._child = SocketChild(argv, _environment(), "agent", socket.SOCK_SEQPACKET)
        except OSError as error:
            raise AgentError(f"{argv[0]} cannot be started: {error}", defect="start") from None
        self._process, self._control = self._child.process, self._child.socket
        self._control.setblocking(False)

    async def open(self, first: dict[str, Any]) -> None:
        """Wait until it has imported and built the agent. Raises AgentError."""
        loop = asyncio.get_running_loop()
        data = b""
        with contextlib.suppress(OSError):
            await loop.sock_sendall(self._control, json.dumps(first).encode())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_START_S):
                    data = await loop.sock_recv(self._control, MAX_MESSAGE)
        if not data:
            ended = "did not import it in time" if not await self._process.exits_within(_KILL_S) else "ended"
            problem = f"the process of the agent {ended}: {self._child.said() or 'it printed nothing'}"
            raise AgentError(problem, defect=problem)
        told = json.loads(data)
        if "failed" in told:
            problem = Failed(told["failed"]).in_words()
            raise AgentError(f"it cannot be built: {problem}", defect=problem)
        if told["threads"] > 1:
            log.warning(
                "%d threads run in the agent's process after its import: its episodes do not have them. Start threads "
                "and connections in run",
                told["threads"] - 1,
            )

    async def pass_on(self, connection: socket.socket, limits: dict[str, Any]) -> None:
        """Have a keeper started for the other end of a connection. Raises OSError if the process ended or hangs."""
        data = json.dumps(limits).encode()
        async with self._sending, asyncio.timeout(_PASS_S):
            while True:
                try:
                    socket.send_fds(self._control, [data], [connection.fileno()])
                    return
                except BlockingIOError:  # it forks more slowly than episodes start
                    await asyncio.sleep(_RETRY_S)

    async def kill(self) -> None:
        """Kill it. The episodes end with their connections."""
        self._child.close()
        await self._process.end(_KILL_S)


async def _exchange(connection: socket.socket, task: bytes) -> dict[str, Any]:
    """Send the row and return the reply of the keeper. Closing the connection ends the episode."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=_MAX_REPLY)
    try:
        writer.write(task + b"\n")
        reply: dict[str, Any] = json.loads(await reader.readuntil())
    except asyncio.LimitOverrunError:
        raise AgentError(f"its process sent more than {_MAX_REPLY} bytes") from None
    except (asyncio.IncompleteReadError, OSError):
        raise AgentError("the keeper of its process was killed", defect="keeper") from None
    finally:
        writer.close()
    return reply


def _command(rollout: RolloutConfig) -> list[str]:
    return [rollout.agent_python or sys.executable, "-c", BOOT]


def _environment() -> dict[str, str]:
    """One thread for each library, and no proxy to the gateway."""
    exempt = [os.environ[name] for name in ("no_proxy", "NO_PROXY") if os.environ.get(name)]
    exempt = [",".join([*exempt, "127.0.0.1", "localhost"])]
    own = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "NO_PROXY": exempt[0], "no_proxy": exempt[0]}
    return {**os.environ, **own}


def check_interpreter(rollout: RolloutConfig, run: Callable[..., Any] = subprocess.run) -> None:
    """Import the agent in the interpreter of ``rollout.agent_python``. Raises ConfigError."""
    argv = [*_command(rollout), "--check", rollout.agent, json.dumps(rollout.agent_args)]
    field, value = "rollout.agent", rollout.agent
    try:
        ended = run(argv, env=_environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=_START_S)
        problem = json.loads(ended.stdout)["problem"]
    except subprocess.TimeoutExpired:
        problem = f"its import in {argv[0]} took more than {_START_S:g} s"
    except (OSError, ValueError, KeyError) as error:
        said = ended.stderr.decode("utf-8", "replace").split("\n") if isinstance(error, ValueError) else [str(error)]
        last = next((line for line in reversed(said) if line.strip()), "it printed nothing")
        problem = f"{argv[0]} cannot run it, it must be Python 3.9 or later: {last.strip()[:LAST_WORDS]}"
    if problem:
        raise ConfigError(field, value, f"cannot run in {argv[0]}: {problem}")
