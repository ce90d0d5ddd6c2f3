"""The jobs of the GPU tests, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpu.gpu_all_run import check_on_cpu

pytestmark = pytest.mark.system
JOB = 4


def test_jobs_for_gpus_run_on_the_cpu(tmp_path: Path) -> None:
    check_on_cpu(JOB, tmp_path / "out")
