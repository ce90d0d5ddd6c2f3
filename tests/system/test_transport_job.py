"""A whole job with the weight transport of docs/examples: servers read copies, in a folder outside the trial."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from realsys.weights.disk import manifest
from realsys.weights.disk.stage import stage
from tests.system.jobs import arith, running

pytestmark = pytest.mark.system

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def test_job_trains_over_a_custom_transport(tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    overrides = ["train.total_steps=2", "weights.transport=transport:Mirror", f"weights.transport_args.folder={copies}"]
    path = os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH")]))
    with running(*arith(tmp_path / "runs", "mirrored", *overrides), env={"PYTHONPATH": path}) as live:
        live.wait()
    job = live.job.completed()
    assert [record["step"] for record in job.records("train")] == [1, 2]
    versions = manifest.complete_versions(copies)
    assert [version for version, _, _ in versions] == [1, 2]
    stage(versions[-1][2], 2)
    log = (job.paths.logs / "gserver_manager-0.log").read_text()
    assert f"version 2 published: {versions[-1][2]}" in log
    assert (job.paths.final_model / "config.json").exists()
