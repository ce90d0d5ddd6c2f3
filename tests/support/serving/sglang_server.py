"""The real SGLang for tests: its interpreter, and an engine over it."""

import os
from collections.abc import Callable
from pathlib import Path

from realsys.config.backend_rules import SGLANG_VENV, sglang_interpreter
from realsys.config.schema import Config
from realsys.generation.backend import Materialised
from realsys.generation.sglang.backend import build_sglang_engine
from realsys.generation.sglang.engine import SglangEngine
from realsys.generation.weight_folder import FolderWriter
from realsys.weights.disk.stage import DiskReader
from tests.support.needs import lacks
from tests.support.processes.config_trees import changed


def needs_sglang() -> None:
    """Skip the test outside of `make sglang-test`; fail it there without SGLang."""
    if not (SGLANG_VENV / "bin" / "python").exists() or os.environ.get("REALSYS_PACKAGES") != "1":
        lacks("SGLang: run `make sglang-test`", "REALSYS_PACKAGES")


def sglang_config(*overrides: str) -> Config:
    return changed("generation.backend=sglang", "generation.sglang.args={'context-length': 512}", *overrides)


def sglang_engine(model: Path, *overrides: str, on_change: Callable = print) -> SglangEngine:
    """Not started. Weights are verified and staged as in a run."""

    def write(locator: str, version: int, target: Path, *, loaded: bool = False) -> Materialised:
        """Drop staged versions: tests share a server, and each begins with version 0."""
        return FolderWriter(DiskReader(), model).write(locator, version, target)

    config = sglang_config(*overrides)
    assert Path(sglang_interpreter(config.generation.sglang, gpus=False)).exists()
    return build_sglang_engine(model, config, write, on_change)
