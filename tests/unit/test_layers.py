"""Imports: modules that may import torch, product and tests apart. `make lint` checks their direction."""

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import SHARED_JOBS, shared_job

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("realsys", "workers", "launch", "configs")

#: Modules, or packages with all below them, that work on tensors.
WITH_TORCH = (
    "realsys.algorithm",
    "realsys.cluster.gpu_devices",
    "realsys.generation",  # the embedded engine
    "realsys.model_files.rope",
    "realsys.train.checkpoint",
    "realsys.train.megatron",
    "realsys.train.recording",
    "realsys.train.worker",
    "realsys.weights",
    "realsys.workers.generation_server",
    "realsys.workers.model_worker",
)
#: Modules inside those that must do without: others import them.
WITHOUT_TORCH = (
    "realsys.algorithm",
    "realsys.algorithm.dataflows",
    "realsys.generation",
    "realsys.generation.backend",
    "realsys.generation.client",
    "realsys.generation.completion",
    "realsys.generation.child",
    "realsys.generation.child.engine",
    "realsys.generation.embedded",
    "realsys.generation.embedded.backend",
    "realsys.generation.embedded.prefix_cache",
    "realsys.generation.embedded.scheduler",
    "realsys.generation.protocol",
    "realsys.generation.sampling_rules",
    "realsys.generation.server",
    "realsys.generation.sglang",
    "realsys.generation.sglang.backend",
    "realsys.generation.threaded",
    "realsys.generation.vllm",
    "realsys.generation.vllm.backend",
    "realsys.generation.weight_folder",
    "realsys.train.checkpoint",
    "realsys.train.checkpoint.checkpoint_files",
    "realsys.train.megatron",
    "realsys.train.worker",
    "realsys.train.worker.data_manager",
    "realsys.weights",
    "realsys.weights.contract",
    "realsys.weights.disk",
    "realsys.weights.disk.delta",
    "realsys.weights.disk.plain_folders",
    "realsys.weights.disk.manifest",
    "realsys.weights.disk.reader",
    "realsys.weights.disk.transport",
)

SCRIPT = """
import importlib, json, sys, threading
found = {}
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    if "torch" in sys.modules:
        found[name] = "imports torch"
        break
    if threading.active_count() > 1:
        found[name] = f"starts {[t.name for t in threading.enumerate()]}"
        break
print(json.dumps(found))
"""


def modules():
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    names = (".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files)
    return sorted(f"realsys.{name}".replace("realsys.realsys", "realsys").removesuffix(".__init__") for name in names)


def may_import_torch(name):
    inside = any(name == allowed or name.startswith(f"{allowed}.") for allowed in WITH_TORCH)
    return inside and name not in WITHOUT_TORCH


def imported(names):
    """Import ``names`` one after the other in a new process; return the first problem by module."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, json.dumps(names)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.processes
def test_modules_without_tensors_import_no_torch():
    """Importing them starts no thread either."""
    names = [name for name in modules() if not may_import_torch(name)]
    assert {"realsys.types", "realsys.config.schema", "realsys.launch.cli", "realsys.weights.disk.manifest"} <= set(
        names
    )
    assert imported(names) == {}


def test_modules_that_may_import_torch_exist():
    """A renamed module must not leave a hole behind."""
    known = modules()
    assert [name for name in (*WITH_TORCH, *WITHOUT_TORCH) if name not in known] == []


def imports_of(path):
    """Return the top-level packages that a file imports anywhere, also inside of functions."""
    packages: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            packages.add((node.module or "").partition(".")[0])
    return packages


@pytest.mark.parametrize(
    ("folders", "forbidden"),
    [(("tests",), {"benchmarks"}), (PACKAGES, {"benchmarks", "tests"})],
    ids=["tests", "product"],
)
def test_no_import_of_benchmarks_or_tests(folders, forbidden):
    """Benchmarks may import tests, and tests the product; never the other way round."""
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    assert [str(path) for path in files if imports_of(path) & forbidden] == []


def test_helpers_live_in_support_only():
    """Every other module holds tests or fixtures. tests/chaos is a program: ``python -m tests.chaos``."""
    known = {ROOT / "tests" / "support", ROOT / "tests" / "chaos"}
    others = (path for path in (ROOT / "tests").rglob("*.py") if not known & set(path.parents))
    names = {path.name for path in others if not path.name.startswith("test_")}
    assert names == {"__init__.py", "conftest.py"}


def test_folders_with_modules_are_packages():
    """Only packages are installed. A checkout also imports a folder without __init__.py."""
    folders = {path.parent for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    separate = ROOT / "realsys" / "generation" / "sglang" / "cpu_support"  # installed into SGLang's interpreter
    folders = {folder for folder in folders if separate not in (folder, *folder.parents)}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_folders_of_tests_mirror_the_packages():
    for top in ("unit", "contracts"):
        base = ROOT / "tests" / top
        folders = {path.parent.relative_to(base) for path in base.rglob("test_*.py")} - {Path()}
        assert sorted(f for f in folders if not (ROOT / "realsys" / f).is_dir()) == []


def test_names_of_test_files_are_unique():
    """A name that occurs twice is a name that a search does not find."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name not in ("__init__.py", "conftest.py")]
    names = Counter(path.name for path in files)
    assert [name for name, count in names.items() if count > 1] == []


def test_files_that_share_a_job_exist():
    """A file that was renamed would run its job once more, without a sign."""
    names = {path.name for path in (ROOT / "tests" / "system").rglob("test_*.py")}
    assert set(SHARED_JOBS) <= names
    assert shared_job("tests/system/commands/test_replay_job.py::test_x[a::b]") == "whole"
    alone = "tests/system/failure/test_failures_job.py::test_x"
    assert shared_job(alone) == alone
