"""The contract of call handlers. ``realsys.config.doors.CALL_HANDLER`` lists their names."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Protocol

from realsys.config.doors import CALL_HANDLER
from realsys.model_calls import MfcRequest
from realsys.train.calls.role import Role


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """Result of a call on this rank. Arrays are stored instead (``role.data``).

    stats   reduced over the mesh on ranks of the last pipeline stage; on the others they may be partial
    scores  sample id -> reward of a reward model, for this rank's own sequences; last pipeline stage only
    """

    stats: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)


class CallHandler(Protocol):
    """The work of a model function call on a role. Every rank of the role's mesh runs the same
    call.

    A handler is a class without constructor arguments; a process makes one instance of it. ``run``
    reads and stores arrays in ``role.data``: ranks of the last stage hold the arrays of the loss
    tokens. The request lists the sequences of all ranks. ``run`` may raise only if all ranks raise,
    or if no other rank waits in a collective.
    """

    def run(self, role: Role, request: MfcRequest) -> CallOutcome: ...


@functools.cache
def find_handler(name: str) -> CallHandler:
    """Return the handler of this name or import string, one per process. Raises ConfigError."""
    handler: CallHandler = CALL_HANDLER.load(name)()
    return handler
