"""Tests of ``realsys.observe.timeline.why``, ``.step_times`` and ``.advice``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from realsys.errors import ConfigError
from realsys.observe.timeline.why import (
    PARTS,
    Facts,
    ServerUse,
    StepTime,
    WhyReport,
    WorkerUse,
    advice,
    bottleneck,
    explain,
    sentence,
    step_times,
    sum_of,
)
from tests.support.timelines.made_up import START, MadeUpTrial, raw, small_trial

_STEP = {"wait": 4.0, "inf": 1.0, "train": 4.0, "save": 0.5, "publish": 0.25, "checkpoint": 0.25}


def _time(**parts: float) -> StepTime:
    return StepTime(1, 0.0, {**dict.fromkeys(PARTS, 0.0), **parts})


def _facts(waits: Mapping[str, int], **parts: float) -> Facts:
    return Facts(_time(**parts), waits, ServerUse(1, 0.5, 8.0, 64), WorkerUse(), None)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (
            {"wait": 47.0, "train": 53.0},
            "generation-bound: the trainer waits 47 % of the time for batches, and computes 53 %",
        ),
        (
            {"wait": 2.0, "train": 80.0, "inference": 18.0},
            "training-bound: calls take 98 % of the time, and the trainer waits 2 %",
        ),
        (
            {"wait": 20.0, "train": 30.0, "publish": 50.0},
            "publication-bound: copying and publishing weights takes 50 % of the time",
        ),
        (
            {"train": 40.0, "between": 60.0},
            "evaluation-bound: what lies between two steps, mostly evaluations, takes 60 % of the time",
        ),
    ],
)
def test_sentence_names_the_slower_side(parts: dict[str, float], expected: str) -> None:
    assert sentence(_time(**parts)) == expected


def test_sentence_has_the_percentages_of_the_parts() -> None:
    """Each rounded alone, the calls would be 98 %, and the parts 101 % together."""
    time = _time(wait=0.4, train=97.56, copy=0.68, publish=0.68, other=0.68)
    assert dict(time.percents) == dict.fromkeys(PARTS, 0) | {"train": 97, "copy": 1, "publish": 1, "other": 1}
    assert sentence(time) == "training-bound: calls take 97 % of the time, and the trainer waits 0 %"


def test_parts_of_the_wait_add_up_to_its_percentage() -> None:
    time = _time(wait=30.6, train=60.7, copy=8.7)
    report = WhyReport([], time, {"decode": 10.2, "reward": 10.2, "ticket": 10.2})
    assert time.percents["wait"] == 30
    assert report.wait_percents == {"decode": 10, "reward": 10, "ticket": 10}


def test_bottleneck_looks_at_the_last_steps(tmp_path: Path) -> None:
    trial = MadeUpTrial(tmp_path)
    assert bottleneck(trial.paths) == ""
    trial.steps(*[{"wait": 9.0, "train": 1.0}] * 30, *[{"wait": 0.0, "train": 1.0}] * 20)
    assert bottleneck(trial.paths).startswith("training-bound: calls take 100 %")


def test_bottleneck_reads_the_end_of_a_long_log(tmp_path: Path) -> None:
    """The first record that it reads may be cut; a half-written last one is no record."""
    trial = MadeUpTrial(tmp_path)
    trial.steps(*[{"wait": 0.0, "train": 1.0}] * 5000, *[{"wait": 9.0, "train": 1.0}] * 20)
    with trial.paths.steps.open("ab") as log:
        log.write(b'{"kind":"train","step":99')
    assert bottleneck(trial.paths).startswith("generation-bound: the trainer waits 90 %")


def test_parts_of_a_step_add_up_to_its_time() -> None:
    records = [
        {"kind": "train", "time": 100.0, "step": 1, "seconds": {**_STEP, "total": 10.5}},
        {"kind": "eval", "time": 101.0},
        {"kind": "train", "time": 113.0, "step": 2, "seconds": {**_STEP, "total": 11.0}},
    ]
    first, second = step_times(records)
    assert first.seconds == pytest.approx(10.5)
    assert first.parts["other"] == pytest.approx(0.5)
    assert second.seconds == pytest.approx(13.0)  # from the end of the first step to its own
    assert second.parts["between"] == pytest.approx(2.0)
    assert sum_of([first, second]).seconds == pytest.approx(23.5)


@pytest.mark.parametrize("again", [{"kind": "recovered", "step": 1}, {"kind": "phase", "phase": "connect"}])
def test_time_of_a_restart_is_no_part_of_a_step(again: dict[str, object]) -> None:
    def train(step: int, time: float) -> dict[str, object]:
        return {"kind": "train", "time": time, "step": step, "seconds": {**_STEP, "total": 10.0}}

    times = step_times([train(1, 100.0), {**again, "time": 500.0}, train(2, 5000.0)])
    assert [time.seconds for time in times] == [10.0, 10.0]


def test_unreadable_times_are_left_out() -> None:
    records = [{"kind": "train", "step": 1}, {"kind": "train", "step": "x", "seconds": {}, "time": 1.0}]
    assert step_times(records) == []


def test_report_splits_the_wait(tmp_path: Path) -> None:
    report = explain(small_trial(tmp_path).paths)
    assert report.covered == 1
    assert sum(report.waits.values()) == pytest.approx(report.time.parts["wait"])
    assert max(report.waits, key=lambda name: report.waits[name]) == "decode"
    assert report.sentence.startswith("generation-bound")
    assert report.advice[0].startswith("batches wait for their last completions")


def test_report_without_spans_has_step_times(tmp_path: Path) -> None:
    trial = MadeUpTrial(tmp_path)
    trial.steps(_STEP, _STEP)
    report = explain(trial.paths)
    assert (report.covered, report.waits) == (0, {})
    assert report.time.seconds == pytest.approx(20.0)
    assert report.advice[0].startswith("the trainer waits for generation")


def test_report_takes_chosen_steps(tmp_path: Path) -> None:
    trial = MadeUpTrial(tmp_path)
    trial.steps(*[{"train": float(step)} for step in range(1, 6)])
    assert [time.step for time, _ in explain(trial.paths, 2, 3).steps] == [2, 3]
    with pytest.raises(ConfigError, match="the step log has steps 1 to 5"):
        explain(trial.paths, 8)


def test_trial_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no train step has ended"):
        explain(MadeUpTrial(tmp_path).paths)


def test_report_of_a_large_run_reads_fewer_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = MadeUpTrial(tmp_path)
    trial.steps(*[{"wait": 5.0, "train": 5.0}] * 30)
    spans = [raw(name, 10 * k, 10 * k + 5, f"step/{k + 1}", tickets="") for k in range(30) for name in ("step", "wait")]
    os.utime(trial.spans("master_worker/0", spans), (START + 300, START + 300))
    assert explain(trial.paths).covered == 30
    monkeypatch.setattr("realsys.observe.timeline.clocked_spans.MOST_BYTES", 0)
    assert explain(trial.paths).covered == 1


@pytest.mark.parametrize(
    ("waits", "cause"),
    [
        ({"decode": 40, "reward": 10}, "servers have room"),
        ({"reward": 40, "decode": 10}, "rollout.reward.processes"),
        ({"ticket": 40}, "bound on staleness"),
        ({"tool": 30, "agent": 10}, "its tools"),
        ({"push": 40}, "network"),
    ],
)
def test_advice_begins_with_the_largest_wait(waits: dict[str, int], cause: str) -> None:
    first = advice(_facts(waits, wait=50.0, train=50.0))[0]
    assert cause in first
    assert first.endswith("(gains at most 40 %)")


def test_slow_trainer_is_advised_more_devices() -> None:
    (line,) = advice(_facts({}, wait=1.0, train=99.0))
    assert line.startswith("training is the slower side")


def test_report_is_json(tmp_path: Path) -> None:
    from realsys.launch.commands.why import as_record

    record = msgspec.json.decode(msgspec.json.encode(as_record(explain(small_trial(tmp_path).paths))))
    assert record["steps"][0]["end"] == START + 15
    assert record["servers"]["servers"] == 1
