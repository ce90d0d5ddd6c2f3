"""Failpoints: the hook of the product, and the points that it passes."""

import re
from pathlib import Path

import pytest

from realsys.cluster import failpoint as hook
from realsys.cluster.failpoint import MODULE, arm, failpoint
from tests.support.faults.points import POINTS

ROOT = Path(__file__).resolve().parents[3]


def test_product_passes_each_point_and_no_other():
    sources = [p for folder in ("realsys", "workers", "launch") for p in (ROOT / folder).rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources if path.name != "failpoint.py")
    assert set(re.findall(r"\bfailpoint(?:\(\s*|=)\"([^\"]+)\"", text)) == set(POINTS)


def test_nothing_is_armed_without_the_variable(monkeypatch):
    monkeypatch.delenv(MODULE, raising=False)
    monkeypatch.setattr(hook._Process, "action", None)
    arm("a/0")
    assert hook._Process.action is None and failpoint("rollout.push") == ""


def test_unknown_module_ends_a_process_by_name(monkeypatch):
    monkeypatch.setenv(MODULE, "no_such_faults")
    with pytest.raises(ModuleNotFoundError, match="no_such_faults"):
        arm("a/0")


def test_the_page_lists_every_point():
    page = (ROOT / "docs" / "chaos.md").read_text("utf-8")
    assert [line for line in page.splitlines() if line.startswith("| `")] == [
        f"| `{name}` | {when} |" for name, when in POINTS.items()
    ]
