"""A few faults of each kind, in whole runs of the small arith job. Everything: `make chaos`."""

import pytest

from tests.chaos.driver import run_case
from tests.chaos.schedule.cases import short

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


@pytest.mark.parametrize("case", short(), ids=lambda case: case.name)
def test_nothing_is_lost_or_left_behind(case, tmp_path):
    result = run_case(case, tmp_path / case.name)
    assert result.good, f"{result.problems}\n{result.rows}\n{result.report}"
    assert all(row.outcome == "survived" or case.ends for row in result.rows)
