"""The source distribution: what a user gets from an archive instead of a checkout."""

import re
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
    folders = (".ci", "benchmarks", "configs", "docs", "launch", "tests", "workers")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    wanted = {str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"}
    assert wanted - listed == set()
    assert {"CHANGELOG.md", "README.md", "Makefile", "constraints.txt"} <= listed
    assert not any(name.endswith(".pyc") for name in listed)
    metadata = sources.with_name("PKG-INFO").read_text("utf-8")
    assert "\nLicense-Expression: Apache-2.0\n" in metadata and "\nClassifier: " in metadata
    relative = re.findall(r"\]\((?!https?:)[^)]*\)", metadata)  # a package index has no such pictures and pages
    assert (
        relative == [] and "[AReaL](https://arxiv.org/abs/2505.24298)" in metadata and "tutorial takes 15" in metadata
    )
