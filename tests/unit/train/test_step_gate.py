"""The gate that lets a stop abandon a step: promises, limits, and the decision over all ranks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest

from realsys.train.step_gate import GateState, PauseStepRequest, SettleRequest, StepAbandoned, StepGate, decide

BOUND_S = 30.0


def gate_after(passes: int, *, updating: bool = False) -> StepGate:
    gate = StepGate()
    gate.begin(3, "actor_train")
    for _ in range(passes):
        assert gate.passes()
    if updating:
        assert gate.passes(updating=True)
    return gate


def start(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_open_gate_lets_everything_pass() -> None:
    gate = gate_after(5, updating=True)
    gate.check()
    assert gate.pause(PauseStepRequest()) == GateState(3, {"actor_train": 6}, updating=True)


def test_paused_gate_waits_for_the_decision() -> None:
    gate, passed = gate_after(2), Counter[bool]()
    promised = gate.pause(PauseStepRequest()).passed["actor_train"]
    waiting = start(lambda: passed.update([gate.passes()]))
    assert promised == 2 and not passed
    gate.settle(SettleRequest(abandon=False))
    waiting.join(BOUND_S)
    assert passed == {True: 1}


def test_rank_behind_passes_up_to_the_limit() -> None:
    behind, ahead = gate_after(1), gate_after(3)
    decision = decide([gate.pause(PauseStepRequest()) for gate in (behind, ahead)], 3)
    for gate in (behind, ahead):
        gate.settle(decision)
    assert [behind.passes() for _ in range(4)] == [True, True, False, False]
    assert not ahead.passes(updating=True)
    for gate in (behind, ahead):
        with pytest.raises(StepAbandoned):
            gate.check()


def test_call_that_no_rank_has_begun_is_abandoned() -> None:
    gate = gate_after(4)
    gate.settle(decide([gate.pause(PauseStepRequest())], 3))
    gate.begin(3, "critic_train")
    assert not gate.passes()


def test_step_that_updates_is_finished() -> None:
    states = [gate_after(2).pause(PauseStepRequest()), gate_after(2, updating=True).pause(PauseStepRequest())]
    assert decide(states, 3) == SettleRequest(abandon=False)


def test_rank_of_an_earlier_step_does_not_count() -> None:
    done = gate_after(6, updating=True).pause(PauseStepRequest())
    assert decide([done], 4) == SettleRequest(abandon=True, limits={})


def test_next_step_begins_without_updates() -> None:
    gate = gate_after(2, updating=True)
    gate.begin(4, "actor_train")
    assert gate.pause(PauseStepRequest()) == GateState(4, {}, updating=False)


def test_gate_opens_without_a_decision() -> None:
    gate = StepGate(decision_s=0.0)
    gate.pause(PauseStepRequest())
    assert gate.passes()
