"""The gate that every micro-batch and every optimizer step passes, so that a stop can abandon a step. No torch.

    open ──pause──> paused ──settle(abandon=False)──> open
                      └─────settle(abandon=True)───> ending: a call passes up to its limit, then is abandoned

Rules
    promised      The reply to ``pause`` says how often each call of the step has passed. Until ``settle``
                  nothing passes after that.
    alike         All ranks of a mesh pass alike: same calls, same micro-batches. The limit of a call is the
                  largest number that any rank has promised. So every rank stops at the same place, and none
                  waits in a collective for a rank that has stopped.
    consistent    A step is abandoned only if no rank has begun an optimizer step in it (``decide``). Weights
                  and optimizer state are then those of the step before.

``pause`` and ``settle`` run in the thread that reads the master's requests, because the main thread is
inside the call.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable

import msgspec

from realsys.errors import RealsysError

log = logging.getLogger(__name__)

#: bound on the wait for the master's decision; after that the step continues
DECISION_S = 30.0


class PauseStepRequest(msgspec.Struct):
    """Let nothing pass until ``SettleRequest``, and say how far the step is."""


class GateState(msgspec.Struct):
    """Number of times that each call of a step has passed the gate on one rank.

    ``version``: of the weights that the step began with. ``updating``: an optimizer step has begun in it.
    """

    version: int = -1
    passed: dict[str, int] = {}
    updating: bool = False


class SettleRequest(msgspec.Struct):
    """The master's decision for all ranks. ``limits``: call -> how often it may pass; others may not pass."""

    abandon: bool
    limits: dict[str, int] = {}


class StepAbandoned(RealsysError):
    """A call was abandoned, on all ranks of its mesh, because the run stops."""


def decide(states: Iterable[GateState], version: int) -> SettleRequest:
    """Return what to do with the step that began with ``version``, from the states of all ranks."""
    # A rank without a call of this step still reports the step before.
    current = [state for state in states if state.version == version]
    if any(state.updating for state in current):
        return SettleRequest(abandon=False)
    limits: dict[str, int] = {}
    for state in current:
        for call, passed in state.passed.items():
            limits[call] = max(passed, limits.get(call, 0))
    return SettleRequest(abandon=True, limits=limits)


class StepGate:
    """The gate of one rank, for all its roles. It is open until the master pauses it."""

    def __init__(self, decision_s: float = DECISION_S) -> None:
        self._decision_s = decision_s
        self._changed = threading.Condition()
        self._version = -1
        self._call = ""
        self._passed: Counter[str] = Counter()
        self._updating = False
        self._paused = False
        self._limits: dict[str, int] | None = None  # set by a decision to abandon
        self._shut = False  # the running call was stopped at its limit

    def begin(self, version: int, call: str) -> None:
        """Begin ``call`` of the step on ``version``. What passes from now on belongs to it."""
        with self._changed:
            if version != self._version:
                self._version, self._updating = version, False
                self._passed.clear()
            self._call = call
            self._shut = False

    def passes(self, *, updating: bool = False) -> bool:
        """Return True if the next micro-batch may run, or with ``updating`` the optimizer step.

        Waits while the gate is paused.
        """
        with self._changed:
            if self._paused and not self._changed.wait_for(lambda: not self._paused, self._decision_s):
                log.error("no decision of the master within %g s: the step goes on", self._decision_s)
                self._paused = False
            passed = self._passed[self._call]
            if self._limits is not None and passed >= self._limits.get(self._call, 0):
                self._shut = True
                return False
            self._passed[self._call] += 1
            self._updating |= updating
            return True

    def check(self) -> None:
        """Raise StepAbandoned if the running call was stopped."""
        if self._shut:
            raise StepAbandoned(f"{self._call} on version {self._version} was abandoned: the run stops")

    def pause(self, request: PauseStepRequest) -> GateState:
        """Let nothing pass until ``settle``."""
        with self._changed:
            self._paused = self._limits is None
            return self._state()

    def settle(self, request: SettleRequest) -> GateState:
        """Open the gate, or end the step at its limits. Sent again, it only says how far the step is."""
        with self._changed:
            self._paused = False
            if request.abandon:
                self._limits = request.limits
            self._changed.notify_all()
            return self._state()

    def _state(self) -> GateState:
        return GateState(self._version, dict(self._passed), self._updating)
