"""The source distribution: what a user gets from an archive instead of a checkout."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]


def test_source_distribution_has_docs_tests_and_versions(tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    [sources] = tmp_path.glob("*/SOURCES.txt")
    listed = set(sources.read_text("utf-8").split())
    folders = ("benchmarks", "configs", "docs", "launch", "tests", "workers")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    wanted = {str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"}
    assert wanted - listed == set()
    assert {"CHANGELOG.md", "README.md", "Makefile", "constraints.txt"} <= listed
    assert not any(name.endswith(".pyc") for name in listed)
