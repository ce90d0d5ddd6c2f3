"""Tests of ``realsys.observe.timeline.clocked_spans``: the names of a completion on a server lead to its episode."""

from __future__ import annotations

import pytest

from realsys.generation.client import SamplingSpec
from realsys.observe.timeline.clocked_spans import attempt_of, completion_of, number_of
from realsys.rollout.resumable_engine import EngineCall
from realsys.types import Ticket


@pytest.mark.parametrize(
    ("unit", "episode", "call"),
    [
        ("0000000105.0.2.0.0#3", "0000000105.0/5", 0),  # the fourth completion of a merged first call
        ("0000000105.1.2.0.7.3#0", "0000000105.1/5", 0),  # the same one, continued elsewhere
        ("0000000105.0.4.6.0#0", "0000000105.0/4", 6),
        ("eval-step-10.aime-000012.0.0.1.0#0", "eval-step-10.aime-000012.0/0", 1),
    ],
)
def test_completion_leads_to_its_episode(unit: str, episode: str, call: int) -> None:
    completion = completion_of(unit)
    assert completion is not None
    assert (completion.unit, completion.call) == (episode, call)
    assert attempt_of(unit) == episode.partition("/")[0]


@pytest.mark.parametrize("unit", ["", "f3a9c0#0", "step/4", "version/-1", "first00000002#0"])
def test_other_units_are_of_no_attempt(unit: str) -> None:
    assert completion_of(unit) is None
    assert attempt_of(unit) == ""


def test_request_ids_are_read_back() -> None:
    """The form that RolloutWorkers write, with the suffix of a trip and of a server."""
    call = EngineCall(Ticket("0000000003", 2, 0), "1.4", [1], SamplingSpec(), 0)
    completion = completion_of(f"{call.rid}.0#0")
    assert completion is not None
    assert (completion.attempt, completion.episode, completion.call) == (call.ticket.unit, 1, 4)


def test_numbers_are_of_one_kind() -> None:
    assert number_of("step/12", "step") == 12
    assert number_of("step/12", "version") is None
    assert number_of("0000000003.2/1", "step") is None
