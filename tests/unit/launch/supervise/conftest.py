from pathlib import Path

import pytest

from realsys.launch.nodes.orders import LOCAL
from tests.support.processes.supervised import Trial


@pytest.fixture(params=[LOCAL, "a"], ids=["local", "agent"])
def trial(tmp_path: Path, request: pytest.FixtureRequest) -> Trial:
    """The processes run on this machine, or on a node with an agent."""
    return Trial(tmp_path, request.param)
