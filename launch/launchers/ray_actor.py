"""The Ray actor that runs one node agent as a child process. Standard library and Ray only.

Ray's worker processes get this module by value (ray_launcher.py), so they need no realsys. The agent's command does.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path


class AgentActor:
    """The agent of one node. One method runs at a time, so every method returns soon.

    The agent leads its own session, because Ray kills the process group of an actor. It asks the kernel to kill it when
    this process ends (REALSYS_PARENT_PID): so no agent outlives its actor, also when Ray's own processes are killed.
    """

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None

    def where(self) -> tuple[str, str]:
        """Return the name of this host and the id of this Ray node."""
        import ray

        return socket.gethostname(), ray.get_runtime_context().get_node_id()

    def start(self, argv: list[str], log: str) -> str:
        """Start the agent; its output goes to the end of ``log``. Returns the problem, or ""."""
        path = Path(log)
        if not path.parent.is_dir():
            return f"it does not see the folder {path.parent}: put `fileroot` on storage that all nodes share"
        env = {**os.environ, "REALSYS_PARENT_PID": str(os.getpid())}
        try:
            with path.open("ab") as output:
                self._agent = subprocess.Popen(
                    argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
        except OSError as exc:
            return f"it cannot start the agent: {exc}"
        return ""

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code of the agent, or minus the signal; None if it runs for longer than ``timeout_s``."""
        assert self._agent is not None
        try:
            return self._agent.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self, timeout_s: float) -> None:
        """Ask the agent to end, and kill it after ``timeout_s``."""
        if self._agent is None or self._agent.poll() is not None:
            return
        self._agent.send_signal(signal.SIGTERM)
        if self.wait(timeout_s) is None:
            self._agent.kill()
            self._agent.wait()
