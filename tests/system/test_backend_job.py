"""A whole job whose generation is done by docs/examples/backend.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.system.jobs import processes_of, run_arith
from tests.system.ledgers import check_ledger, check_staleness

pytestmark = pytest.mark.system
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
STEPS = 3


def test_job_trains_on_what_the_example_backend_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    settings = [
        "allocation=serve.d1+d1",
        "generation.backend=backend:Echo",
        "generation.backend_args.tokens=3",
        "warmup.steps=2",
        f"train.total_steps={STEPS}",
    ]
    job = run_arith(tmp_path, "echo", *settings).completed()
    steps = job.records("train")
    assert [step["version"] for step in steps] == list(range(1, STEPS + 1))
    assert all(np.isfinite(step["stats"]["loss"]) for step in steps)
    # The last evaluation was answered with the last version: the engine has taken every update.
    assert job.records("eval")[-1]["version_min"] == STEPS
    check_staleness(job, eta=4)
    check_ledger(job, batch_groups=8, eta=4, prompts=400)
    assert processes_of(job.root) == []
