"""Reading a trial for the planner."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from realsys.errors import ConfigError
from realsys.lab.planner.cost_estimates import errors_of, load_of, non_negative
from realsys.lab.planner.recorded_run import GroupTime, Recording, StepCost, read_recording, steady
from tests.support.planner.recordings import COSTS, STEPS, config_of, recording_of, write_trial


def test_trial_is_read_from_its_folder(tmp_path: Path) -> None:
    write_trial(tmp_path / "trial", COSTS)
    found = read_recording(tmp_path / "trial")
    assert len(found.steps) == STEPS - 1
    assert len(found.groups) > STEPS * 8
    assert all(group.seconds > 0 for group in found.groups)
    assert found.lengths == []


@pytest.mark.parametrize(
    ("file", "lines", "problem"),
    [
        ("steps.jsonl", 3, "has 3 train steps, and a fit needs 8"),
        ("ledger.jsonl", 0, "has no group that began and ended during its steps"),
        ("", 0, "is not the folder of a trial"),
    ],
)
def test_unusable_trial_is_refused(tmp_path: Path, file: str, lines: int, problem: str) -> None:
    """``lines``: how many lines of the file are left."""
    write_trial(tmp_path / "trial", COSTS)
    if file:
        cut = tmp_path / "trial" / file
        cut.write_bytes(b"".join(cut.read_bytes().splitlines(keepends=True)[:lines]))
    with pytest.raises(ConfigError, match=problem):
        read_recording(tmp_path / ("trial" if file else ""))


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


def test_checkpoints_are_left_out(tmp_path: Path) -> None:
    write_trial(tmp_path / "trial", COSTS)
    path = tmp_path / "trial" / "steps.jsonl"
    before = read_recording(tmp_path / "trial")
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    for record in records:
        record["seconds"] |= {"checkpoint": 0.25, "total": record["seconds"]["total"] + 0.25}
        record["time"] += 0.25
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    after = read_recording(tmp_path / "trial")
    assert [step.total for step in after.steps] == pytest.approx([step.total for step in before.steps])
    assert [step.end for step in after.steps] == pytest.approx([step.end for step in before.steps])


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


@pytest.mark.parametrize("unit", [1.0, 1e6])
def test_factors_do_not_depend_on_units(unit: float) -> None:
    """The target needs the first two columns, and all three together explain it with a negative factor."""
    random = np.random.default_rng(4)
    columns = random.uniform(0.0, 1.0, (200, 3))
    target = 2.0 * columns[:, 0] + 1.0 * columns[:, 1] - 0.3 * columns[:, 2]
    scales = np.array([1.0, unit, 1.0 / unit])
    factors = non_negative(columns * scales, target) * scales
    assert factors == pytest.approx(non_negative(columns, target))
    assert factors[2] == 0.0 and factors[0] > 1.5 and factors[1] > 0.5


def test_equal_columns_give_the_first() -> None:
    """Without lengths the time of a group and that of its tokens cannot be told apart: it is that of the tokens."""
    column = np.linspace(1.0, 2.0, 10)[:, None]
    assert non_negative(np.hstack([50.0 * column, column]), 100.0 * column[:, 0]).tolist() == pytest.approx([2.0, 0.0])


def test_noise_makes_the_error_larger() -> None:
    noise = np.random.default_rng(1).normal(size=400)
    _, small = errors_of(400, lambda chosen: np.array([0.1 * noise[chosen].mean()]))
    _, large = errors_of(400, lambda chosen: np.array([noise[chosen].mean()]))
    assert 0 < small[0] < large[0] < 0.2
