"""Fixtures of the system tests."""

import pytest
from transformers.utils import logging


@pytest.fixture(scope="session", autouse=True)
def no_progress_bars():
    """transformers' bars keep a thread for ever, which looks like something that a test left running."""
    logging.disable_progress_bar()
