"""The model of all tests here: the arith model after its warm-up with chats, made once."""

import os
from pathlib import Path

import pytest

from tests.support.agents.trained import EXAMPLES, ROOT, warm_up


@pytest.fixture(scope="session", autouse=True)
def examples():
    """Put the examples, and the recorded engine, on the path of the jobs that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        own = [str(EXAMPLES), str(ROOT), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, own)))
        yield


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory: pytest.TempPathFactory, examples: None) -> Path:
    return warm_up(tmp_path_factory.mktemp("warm"))
