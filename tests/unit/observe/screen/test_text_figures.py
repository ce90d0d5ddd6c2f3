"""Shares that add up, and curves on a fixed scale."""

from __future__ import annotations

import pytest

from realsys.observe.screen.text_figures import (
    curve_text,
    fmt,
    memory_text,
    scale_of,
    sparkline,
    time_split,
    worth_showing,
)


def test_share_is_rounded_as_on_the_page() -> None:
    assert fmt(0.8125, ".1%") == "81.3%" and fmt(None, ".1%") == "-"


def test_step_time_names_what_no_part_has() -> None:
    seconds = {"wait": 0.0, "inf": 1.4436, "train": 4.264, "save": 0.0, "publish": 0.1, "total": 6.56}
    assert time_split([{"seconds": seconds}]) == "6.56 s: inf 22%, train 65%, publish 2%, other 11%"
    assert time_split([{"seconds": {"total": 2.0}}]) == "2.00 s"
    assert time_split([{}]) == "-"


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([], (0, 1)),
        ([0.88, 0.92], (0.75, 1)),
        ([0.48, 0.79], (0.25, 1)),
        ([1.0, 1.0], (0.75, 1)),
        ([0.0, 0.0], (0, 0.25)),
        ([-0.3, 0.5], (-0.5, 1)),
        ([0.0, 37.0], (0, 50)),
        ([-1.0, 1.0], (-1, 1)),
    ],
)
def test_scale_does_not_follow_the_noise(values: list[float], scale: tuple[float, float]) -> None:
    assert scale_of(values) == scale


def test_sparkline_is_bounded_in_width_and_height() -> None:
    assert sparkline([1.0], 0.0, 1.0) == ""
    line = sparkline([float(i) for i in range(1000)], 0.0, 1000.0)
    assert len(line) == 24 and line[0] == "▁" and line[-1] == "█"
    assert sparkline([-5.0, 5.0, float("nan")], 0.0, 1.0) == "▁█"


def test_course_near_ninety_percent_is_flat() -> None:
    records = [{"accuracy": value} for value in (0.88, 0.92, 0.88, 0.92)]
    assert curve_text(records, "accuracy") == "▅▆▅▆ 0.75..1"


def test_rise_from_half_to_four_fifths_is_seen() -> None:
    records = [{"accuracy": value} for value in (0.48, 0.59, 0.70, 0.79)]
    assert curve_text(records, "accuracy") == "▃▄▅▆ 0.25..1"


def test_counts_of_the_gateway_are_shown_if_any() -> None:
    metrics = {"gateway/calls": 1.5, "gateway/retries": 0.0, "tries": 0.0}
    assert worth_showing(metrics) == ["gateway/calls", "tries"]
    assert worth_showing(metrics, {"gateway/retries": 0.1}) == ["gateway/calls", "gateway/retries", "tries"]


def test_memory_is_summed_by_kind() -> None:
    sizes = {"generation_server/0": 3 << 30, "generation_server/1": 1 << 30, "rollout_worker/0": 200 << 20}
    rows = [{"name": name, "memory_bytes": size} for name, size in sizes.items()]
    rows += [{"name": "rollout_worker/1", "memory_bytes": None}, {"name": "master_worker/0"}]
    expected = "servers 4.0 GiB (largest 3.0 GiB), RolloutWorkers 0.2 GiB"
    assert memory_text({"workers": rows}) == expected
    assert memory_text({"workers": rows[2:]}) == "RolloutWorkers 0.2 GiB"
    assert memory_text({}) == "" and memory_text({"workers": "?"}) == ""
