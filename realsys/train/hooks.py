"""What runs before and after a model function call, by name: the hooks that a dataflow gives its calls.

A module of your own registers one with the decorator; ``plugins.train`` imports it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from realsys.errors import ModelError
from realsys.train.interfaces import Role
from realsys.types import MfcRequest

#: Runs on every rank of the role's mesh, so it may be a collective. What it raises ends the worker.
Hook = Callable[[Role, MfcRequest], None]

HOOKS: dict[str, Hook] = {}


def register_hook(name: str) -> Callable[[Hook], Hook]:
    """Decorator: calls that list ``name`` in their pre_hooks or post_hooks run this function.

    Raises ModelError when the name is taken.
    """

    def register(hook: Hook) -> Hook:
        if name in HOOKS:
            raise ModelError(f"hook {name!r} is registered already, by {HOOKS[name].__module__}")
        HOOKS[name] = hook
        return hook

    return register


def find_hook(name: str) -> Hook:
    """Raises ModelError that lists the known ones."""
    if name not in HOOKS:
        known = ", ".join(sorted(HOOKS))
        raise ModelError(f"unknown hook {name!r}; known: {known} (yours: name its module in plugins.train)")
    return HOOKS[name]


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
