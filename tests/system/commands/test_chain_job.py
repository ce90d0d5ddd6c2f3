"""`realsys chain` with real processes: supervised stages without servers."""

import pytest

from realsys.config.paths import TrialPaths
from realsys.observe.step_log import read_steps
from tests.support.jobs.jobs import realsys

pytestmark = pytest.mark.system

STAGE = """
experiment: arith
algorithm: sft
allocation: {allocation}
data: {{arith: {{max_operands: 6, train_size: 40, eval_size: 8, demo_size: 400}}}}
train: {{batch_groups: 16, total_steps: 4, optimizer: {{lr: 3.0e-3}}}}
evaluation: {{problems: 0}}
telemetry: {{curves_every_s: 0, trackers: []}}
"""


def test_stages_without_servers_go_on_from_each_other(tmp_path):
    files = []
    for name, allocation in (("first", "d2"), ("second", "d1p2")):
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(STAGE.format(allocation=allocation))
    words = ["chain", *files, f"fileroot={tmp_path}", "--trial", "c", "--plain"]
    done = realsys(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (TrialPaths(tmp_path / "arith" / f"c-{number}") for number in (1, 2))
    for paths in (first, second):
        kinds = {file.stem.rpartition("-")[0] for file in paths.logs.iterdir()}
        assert kinds == {"gserver_manager", "model_worker", "master_worker"}
        assert len([path for path in paths.weights().iterdir() if path.is_dir()]) == 1, "only the model is written"
    (_, end), (begin, after) = (
        [record for record in read_steps(paths.steps) if record["kind"] == "eval"] for paths in (first, second)
    )
    assert begin["loss"] == pytest.approx(end["loss"], rel=1e-5) and after["loss"] < begin["loss"]
    assert f"{begin['loss']:.3f} -> {after['loss']:.3f}" in done.stdout

    again = realsys(*words)
    assert again.returncode == 0 and again.stdout.count("complete already") == 4
    assert "step 1/4" not in again.stdout
