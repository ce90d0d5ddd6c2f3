"""What runs before and after a model function call, by name: the hooks that a dataflow gives its calls.

A module of your own registers one with the decorator; ``plugins.train`` imports it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from realsys.config.registry import Registry
from realsys.train.interfaces import Role
from realsys.types import MfcRequest

#: Runs on every rank of the role's mesh, so it may be a collective. What it raises ends the worker.
Hook = Callable[[Role, MfcRequest], None]

HOOKS: Registry[Hook] = Registry("hook", "plugins.train")


def register_hook(name: str) -> Callable[[Hook], Hook]:
    """Decorator: calls that list ``name`` in their pre_hooks or post_hooks run this function.

    Raises ConfigError when the name is taken.
    """
    return HOOKS.register(name)


@register_hook("onload")
def onload(role: Role, request: MfcRequest) -> None:
    """Bring back to the device what ``offload`` sent out; nothing when all of it is there."""
    role.engine.onload()


@register_hook("offload")
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
