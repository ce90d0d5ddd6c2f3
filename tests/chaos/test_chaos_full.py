"""Every case of the suite; collected with REALSYS_CHAOS=full only."""

import pytest

from tests.chaos.driver import run_case
from tests.chaos.schedule.cases import full

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("case", full(1), ids=lambda case: case.name)
def test_nothing_is_lost_or_left_behind(case, tmp_path):
    result = run_case(case, tmp_path / case.name)
    assert result.good, f"{result.problems}\n{result.rows}\n{result.report}"
