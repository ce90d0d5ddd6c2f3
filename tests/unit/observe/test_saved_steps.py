"""The line about the last steps of a stopped run."""

from __future__ import annotations

import pytest

from realsys.launch.conclude import saved_line
from realsys.launch.supervise.restart_policy import NO_CHECKPOINT


@pytest.mark.parametrize(
    ("trained", "saved", "line"),
    [
        (0, NO_CHECKPOINT, "no step was trained yet"),
        (0, 0, "no step was trained yet"),
        (12, 12, "step 12 is saved, no step is lost"),
        (12, 10, "2 trained steps are lost: the last checkpoint has step 10"),
        (3, 2, "1 trained step is lost: the last checkpoint has step 2"),
        (3, NO_CHECKPOINT, "3 trained steps are lost: there is no checkpoint"),
    ],
)
def test_saved_line_counts_lost_steps(trained: int, saved: int, line: str) -> None:
    assert saved_line(trained, saved) == line
