"""Episodes of a user's agent in separate processes: the side of the RolloutWorker. Inside: ``realsys.agent_runner``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from realsys.agent_runner import BOOT
from realsys.agent_runner.contract import Failed
from realsys.agent_runner.runner import MAX_MESSAGE
from realsys.cluster.children.child_process import LAST_WORDS, SocketChild, how_it_ended, is_logged
from realsys.config.schema_rollout import RolloutConfig
from realsys.errors import AgentError, ConfigError
from realsys.rollout.agents.contract import PLACES, EpisodeTime

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
