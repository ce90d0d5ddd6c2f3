"""Hooks: functions that run before or after a model function call. Their names: ``realsys.config.doors.HOOK``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

from realsys.config.doors import HOOK
from realsys.train.calls import Role
from realsys.types import MfcRequest

#: Runs on every rank of the role's mesh, so it may be a collective. What it raises ends the worker.
Hook = Callable[[Role, MfcRequest], None]


@functools.cache
def find_hook(name: str) -> Hook:
    """Return the hook of this name or import string. Raises ConfigError."""
    hook: Hook = HOOK.load(name)
    return hook


def onload(role: Role, request: MfcRequest) -> None:
    """Bring back to the device what ``offload`` sent out; nothing when all of it is there."""
    role.engine.onload()


def offload(role: Role, request: MfcRequest) -> None:
    """Send to host memory what the role's settings say: its optimizer state, or its parameters, too."""
    role.engine.offload()


@contextlib.contextmanager
def onloaded(role: Role) -> Iterator[None]:
    """For what needs the role's tensors between its calls: they are on the device inside the block."""
    role.engine.onload()
    try:
        yield
    finally:
        role.engine.offload()
