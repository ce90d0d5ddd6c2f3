"""The model of all tests here: the arith model after its warm-up with chats, made once."""

import fcntl
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
    """Of several processes of pytest-xdist one makes it, and the others wait for it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "warm"
    folder.mkdir(exist_ok=True)
    made = folder / "made"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # bounded by the timeout of the test
        if not made.exists():
            made.write_text(str(warm_up(folder)))
    return Path(made.read_text())
