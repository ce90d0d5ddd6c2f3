"""Fixtures of the system tests."""

import pytest
from transformers.utils import logging

from tests.support.jobs.jobs import Job, run_arith

STEPS = 5


@pytest.fixture(scope="session", autouse=True)
def no_progress_bars():
    """transformers' bars keep a thread for ever, which looks like something that a test left running."""
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A finished run with all five kinds of process, for all tests that only look at one: nothing may change it."""
    settings = ["checkpoint.every_steps=2", f"train.total_steps={STEPS}"]
    return run_arith(tmp_path_factory.mktemp("runs"), "whole", *settings).completed()
