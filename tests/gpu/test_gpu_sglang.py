"""A job on GPUs whose completions SGLang samples. Needs an interpreter that has sglang."""

import os

import pytest

from tests.support.jobs.jobs import processes_of, run_arith

pytestmark = [pytest.mark.gpu, pytest.mark.system]
STEPS = 3


@pytest.mark.timeout(900)
def test_sglang_serves_every_version(tmp_path):
    """REALSYS_SGLANG_PYTHON names the interpreter."""
    python = os.environ.get("REALSYS_SGLANG_PYTHON", "")
    if not python:
        pytest.skip("REALSYS_SGLANG_PYTHON names no interpreter with sglang")
    settings = [
        *("allocation=auto", "model.dtype=bfloat16", "generation=sglang", f"generation.sglang.python={python}"),
        *("generation.sglang.args.mem-fraction-static=0.4", "cluster.connect_timeout_s=400"),
        f"train.total_steps={STEPS}",
    ]
    job = run_arith(tmp_path, "sglang", *settings, timeout_s=800).completed()
    steps = job.records("train")
    assert [step["version"] for step in steps] == list(range(1, STEPS + 1))
    assert job.records("eval")[-1]["version_min"] == STEPS
    assert steps[0]["agreement"]["difference_mean"] < 0.05
    assert processes_of(job.root) == []
