"""Interfaces by name. A module of your own registers one with the decorator; ``plugins.train`` imports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from realsys.config.registry import Registry
from realsys.train.interfaces.role import Role
from realsys.types import MfcRequest


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What a call leaves beside the arrays it stored: both are those of this rank.

    stats   reduced over the mesh on ranks of the last pipeline stage; on the others they may be partial
    scores  sample id -> reward of a reward model, for this rank's own sequences; last pipeline stage only
    """

    stats: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)


class Interface(Protocol):
    """What a model function call does with a role. Every rank of the role's mesh runs the same call.

    It reads and stores arrays in ``role.data`` (ranks of the last stage hold those of the answers), and what it needs
    to know of other ranks' sequences stands in the request. It may raise; the others must then raise, too, or be
    waiting in no collective.
    """

    def run(self, role: Role, request: MfcRequest) -> CallOutcome: ...


INTERFACES: Registry[Interface] = Registry("interface", "plugins.train")

Kind = TypeVar("Kind", bound=type[Interface])


def register_interface(name: str) -> Callable[[Kind], Kind]:
    """Decorator of a class without constructor arguments: calls whose ``interface`` is ``name`` run its ``run``.

    Raises ConfigError when the name is taken.
    """

    def register(kind: Kind) -> Kind:
        INTERFACES.add(name, kind())
        return kind

    return register


def find_interface(name: str) -> Interface:
    """Raises ConfigError that lists the known ones."""
    return INTERFACES.find(name)
