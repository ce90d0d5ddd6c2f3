"""Hooks: functions that run before or after a model function call.

``realsys.config.doors.HOOK`` lists their names.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

from realsys.config.doors import HOOK
from realsys.model_calls import MfcRequest
from realsys.train.calls.role import Role

#: Runs on every rank of the role's mesh, so it may contain collectives. An error that it raises
#: ends the worker.
Hook = Callable[[Role, MfcRequest], None]


@functools.cache
def find_hook(name: str) -> Hook:
    """Return the hook of this name or import string. Raises ConfigError."""
    hook: Hook = HOOK.load(name)
    return hook


def onload(role: Role, request: MfcRequest) -> None:
    """Bring the role's offloaded tensors back to the device, if any are offloaded."""
    role.engine.onload()


def offload(role: Role, request: MfcRequest) -> None:
    """Move the role's optimizer state, or also its parameters, to host memory, as
    ``roles.<role>.offload`` says.
    """
    role.engine.offload()


@contextlib.contextmanager
def onloaded(role: Role) -> Iterator[None]:
    """Keep the role's tensors on the device inside the block. For work between its calls."""
    role.engine.onload()
    try:
        yield
    finally:
        role.engine.offload()
