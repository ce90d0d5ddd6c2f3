"""One process of the plan over its restarts: its node, its next start."""

from __future__ import annotations

import asyncio
import functools
import signal
from collections.abc import Callable, Mapping

from realsys.launch.nodes.base import Exit, Node, Order, Process
from realsys.launch.process_plan import ProcessSpec

OnChildExit = Callable[["Child", Process, Exit], None]


class Child:
    """A process of the plan. ``process`` is None while it is not running."""

    def __init__(self, spec: ProcessSpec, node: Node) -> None:
        self.spec = spec
        self.process: Process | None = None
        self.pending: asyncio.TimerHandle | None = None  # the next start
        self._node = node
        self._starts = 0

    def start(self, env: Mapping[str, str], log_bytes: int, on_exit: OnChildExit) -> None:
        """Start the process. ``on_exit`` is called when it has ended, also if it could not be started."""
        spec = self.spec
        self.pending = None
        keep = self._starts == 1  # the first restart
        self._starts += 1
        order = Order(spec.argv, {**spec.env, **env}, spec.log, log_bytes, keep, spec.gpus, spec.addresses)
        self.process = self._node.start(order, functools.partial(self._end, on_exit))

    def _end(self, on_exit: OnChildExit, ended: Exit) -> None:
        assert self.process is not None
        process, self.process = self.process, None
        on_exit(self, process, ended)

    def terminate(self) -> None:
        """Send SIGTERM to the process, if it is running."""
        if self.process is not None:
            self.process.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process and its group, if it is running."""
        if self.process is not None:
            self.process.kill()

    def cancel(self) -> None:
        """Cancel the next start."""
        if self.pending is not None:
            self.pending.cancel()
            self.pending = None
