"""The short form of ``benchmarks.fuzz``: every decoder but those that need torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks._targets import Outcome, Target, run
from benchmarks.fuzz import all_targets

INPUTS = 40  # of each decoder


@pytest.fixture
def quiet() -> Iterator[None]:
    """Every rejection is logged; thousands of them would be kept for the report of a failure."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_no_input_makes_a_decoder_do_anything_but_take_it_or_name_what_is_wrong(tmp_path: Path, quiet: None) -> None:
    with all_targets(tmp_path, torch=False) as targets:
        outcomes = [run(target, INPUTS, seed=7) for target in targets]
    assert [crash for outcome in outcomes for crash in outcome.crashes] == []
    assert len(outcomes) > 40
    # Inputs that are all wrong in the same way, or all right, would prove nothing.
    assert sum(outcome.accepted for outcome in outcomes) > 300
    assert sum(outcome.rejected.total() for outcome in outcomes) > 800


def test_same_seed_makes_the_same_inputs() -> None:
    def outcome_of(seed: int) -> list[bytes]:
        from benchmarks._fuzz_stream import messages

        taken: list[bytes] = []
        target = next(target for target in messages() if target.name == "stream: to the master")
        run(Target(target.name, target.make, taken.append, (), target.format), 50, seed)
        return taken

    assert outcome_of(1) == outcome_of(1) != outcome_of(2)


def test_crash_is_reported_with_its_input() -> None:
    def decode(data: bytes) -> None:
        raise IndexError("of course")

    outcome: Outcome = run(Target("broken", lambda spoiler: b"xyz", decode, (ValueError,)), 2, 1)
    assert len(outcome.crashes) == 2 and "xyz" in outcome.crashes[0] and "IndexError" in outcome.crashes[0]
