"""The table of the manager's operations."""

from __future__ import annotations

from pathlib import Path

import realsys
from realsys.manager.operations import EVALUATION, OPERATIONS


def test_every_operation_is_on_the_page_of_the_manager() -> None:
    page = (Path(realsys.__file__).parents[1] / "docs" / "manager.md").read_text(encoding="utf-8")
    table = page[page.index("| call | effect |") :].split("\n\n", 1)[0]
    assert [o.path for o in OPERATIONS if f"{o.path.partition('{')[0]}" not in table] == []


def test_request_of_a_read_is_in_its_path() -> None:
    assert EVALUATION.url_path("step-1") == "/evaluate/step-1"
