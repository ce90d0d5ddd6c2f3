from pathlib import Path

import pytest

from tests.support.processes.supervised import Trial


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)
