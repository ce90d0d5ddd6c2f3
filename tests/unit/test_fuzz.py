"""The short form of ``python -m benchmarks.fuzz``: every decoder except those that need torch."""

import logging

import pytest

from tests.support.fuzz.suite import all_targets
from tests.support.fuzz.targets import run

INPUTS = 40  # per decoder


@pytest.fixture
def quiet():
    """Switch logging off: pytest would keep thousands of logged rejections for its report."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_no_input_crashes_a_decoder(tmp_path, quiet):
    """A decoder takes each input or raises the error that it promises."""
    with all_targets(tmp_path, torch=False) as targets:
        outcomes = [run(target, INPUTS, seed=7) for target in targets]
    assert [crash for outcome in outcomes for crash in outcome.crashes] == []
    assert len(outcomes) > 40
    # Inputs that are all wrong in the same way, or all right, would prove nothing.
    assert sum(outcome.accepted for outcome in outcomes) > 300
    assert sum(outcome.rejected.total() for outcome in outcomes) > 800
