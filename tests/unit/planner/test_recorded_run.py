"""Reading a trial for the planner."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from realsys.errors import ConfigError
from realsys.planner.cost_estimates import steady
from realsys.planner.load import load_of
from realsys.planner.recorded_run import GroupTime, Recording, StepCost, read_recording
from realsys.planner.regression import errors_of, non_negative
from tests.support.planner.recordings import COSTS, STEPS, config_of, recording_of, write_trial


def test_trial_is_read_from_its_folder(tmp_path: Path) -> None:
    write_trial(tmp_path / "trial", COSTS)
    found = read_recording(tmp_path / "trial")
    assert len(found.steps) == STEPS - 1
    assert len(found.groups) > STEPS * 8
    assert all(group.seconds > 0 for group in found.groups)
    assert found.lengths == []


def test_short_trial_is_refused(tmp_path: Path) -> None:
    write_trial(tmp_path / "trial", COSTS)
    steps = tmp_path / "trial" / "steps.jsonl"
    steps.write_bytes(b"".join(steps.read_bytes().splitlines(keepends=True)[:3]))
    with pytest.raises(ConfigError, match="has 3 train steps, and a fit needs 8"):
        read_recording(tmp_path / "trial")
    with pytest.raises(ConfigError, match="is not the folder of a trial"):
        read_recording(tmp_path)


def test_trial_without_groups_is_refused(tmp_path: Path) -> None:
    write_trial(tmp_path / "trial", COSTS)
    (tmp_path / "trial" / "ledger.jsonl").write_bytes(b"")
    with pytest.raises(ConfigError, match="has no group that ended during its steps"):
        read_recording(tmp_path / "trial")


def test_steps_before_a_gap_are_left_out(tmp_path: Path) -> None:
    """The run was stopped for an hour after its tenth step."""
    write_trial(tmp_path / "trial", COSTS)
    path = tmp_path / "trial" / "steps.jsonl"
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    for record in records[:10]:
        record["time"] -= 3600.0
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    found = read_recording(tmp_path / "trial")
    assert [step.step for step in found.steps] == list(range(11, STEPS))


def test_steps_without_generation_are_not_steady() -> None:
    found = recording_of(COSTS)
    end = found.steps[-4].end
    ended = replace(found, groups=[group for group in found.groups if group.granted <= end])
    last = max(group.granted for group in ended.groups)
    assert [step for step in found.steps[4:] if step.end <= last] == steady(ended)
    assert len(steady(ended)) < len(steady(found))


def test_completions_end_at_their_share_of_the_group() -> None:
    step = StepCost(1, 20.0, 20.0, 10.0, 0.0, 10.0, 100, 100, 100)
    group = GroupTime("0", 0, 0.0, 10.0, (100, 50))
    load = load_of(Recording(Path(), config_of(), [step], [group], 1.0))
    moments = [load.moment(time) for time in (1.0, 4.9, 5.5, 9.0, 11.0)]
    assert load.completions[moments].tolist() == [2, 2, 1, 1, 0]
    assert load.training[moments].tolist() == [0, 0, 0, 0, 1]
    assert load.cached[load.moment(9.9)] == pytest.approx(99, abs=3)


def test_factors_are_not_negative() -> None:
    columns = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert non_negative(columns, np.array([1.0, 3.0, 5.0])).tolist() == pytest.approx([1.0, 2.0])
    assert non_negative(columns, np.array([5.0, 3.0, 1.0])).tolist() == pytest.approx([3.0, 0.0])


def test_noise_makes_the_error_larger() -> None:
    noise = np.random.default_rng(1).normal(size=400)
    _, small = errors_of(400, lambda chosen: np.array([0.1 * noise[chosen].mean()]))
    _, large = errors_of(400, lambda chosen: np.array([noise[chosen].mean()]))
    assert 0 < small[0] < large[0] < 0.2
