"""The real SGLang and vLLM for tests: their interpreters, and engines over them."""

import os
from collections.abc import Callable
from pathlib import Path

from realsys.config.backend_rules import SGLANG
from realsys.config.schema import Config
from realsys.generation.backend import Materialise, Materialised, make_backend
from realsys.generation.child.engine import ChildEngine
from realsys.generation.sglang.backend import build_sglang_engine
from realsys.generation.vllm.backend import VLLM
from realsys.generation.weight_folder import FolderWriter
from realsys.weights.disk.stage import DiskReader
from tests.support.needs import lacks
from tests.support.processes.config_trees import changed

VLLM_ROWS = 2


def needs_sglang() -> None:
    """Skip the test outside of `make sglang-test`; fail it there without SGLang."""
    if not (SGLANG.venv / "bin" / "python").exists() or os.environ.get("REALSYS_PACKAGES") != "1":
        lacks("SGLang: run `make sglang-test`", "REALSYS_PACKAGES")


def needs_vllm() -> None:
    """Skip the test outside of `make vllm-test`; fail it there without vLLM."""
    if not (VLLM.venv / "bin" / "python").exists() or os.environ.get("REALSYS_PACKAGES") != "1":
        lacks("vLLM: run `make vllm-test`", "REALSYS_PACKAGES")


def sglang_config(*overrides: str) -> Config:
    return changed("generation.backend=sglang", "generation.sglang.args={'context-length': 512}", *overrides)


def sglang_engine(model: Path, *overrides: str, on_change: Callable = print) -> ChildEngine:
    """Not started. Weights are verified and staged as in a run."""
    config = sglang_config(*overrides)
    assert Path(SGLANG.interpreter(config.generation.sglang.python, gpus=False)).exists()
    return build_sglang_engine(model, config, writer(model), on_change)


def vllm_engine(model: Path, *overrides: str, on_change: Callable = print) -> ChildEngine:
    """As ``sglang_engine``. It samples two completions at a time: the others of a crowd wait inside vLLM.

    With all of them in one batch it would be done with a crowd before a client on a busy machine hears of its start.
    """
    options = f"{{max-model-len: 512, max-num-seqs: {VLLM_ROWS}}}"
    config = changed("generation.backend=vllm", f"generation.backend_args={{args: {options}}}", *overrides)
    return make_backend(config).build_engine(model, writer(model), on_change)


def writer(model: Path) -> Materialise:
    def write(locator: str, version: int, target: Path, **_: bool) -> Materialised:
        """Drop staged versions: tests share a server, and each begins with version 0."""
        return FolderWriter(DiskReader(), model).write(locator, version, target)

    return write
