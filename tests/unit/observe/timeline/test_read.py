"""Tests of ``realsys.observe.timeline.clocked_spans``: segments, windows, damaged files."""

from __future__ import annotations

import os
from pathlib import Path

from realsys.observe.spans import SUFFIX
from realsys.observe.timeline.clocked_spans import bytes_of, read_timeline
from tests.support.timelines.made_up import START, MadeUpTrial, raw, small_trial


def test_trial_without_spans_is_empty(tmp_path: Path) -> None:
    assert list(read_timeline(tmp_path / "spans").spans) == []


def test_window_keeps_what_overlaps_it(tmp_path: Path) -> None:
    trial = MadeUpTrial(tmp_path)
    trial.spans("master_worker/0", [raw("step", 0, 5, "step/1"), raw("step", 5, 9, "step/2")])
    trial.spans("master_worker/0", [raw("step", 20, 25, "step/3"), raw("step", 25, 40, "step/4")], segment=1)
    read = read_timeline(trial.paths.spans, (START + 6, START + 21)).spans
    assert [span.unit for span in read] == ["step/2", "step/3"]


def test_earlier_segments_are_not_read(tmp_path: Path) -> None:
    """A segment that ended before the window is skipped by the next one's header, however large it is."""
    trial = MadeUpTrial(tmp_path)
    old = trial.spans("master_worker/0", [raw("step", 0, 5, "step/1")])
    trial.spans("master_worker/0", [raw("step", 50, 55, "step/2")], segment=1)
    with old.open("ab") as file:
        file.write(b"not json\n")
    assert read_timeline(trial.paths.spans, (START + 52, START + 53)).unread == 0
    assert read_timeline(trial.paths.spans).unread == 1


def test_damaged_segment_costs_only_itself(tmp_path: Path) -> None:
    trial = small_trial(tmp_path)
    whole = len(read_timeline(trial.paths.spans).spans)
    (trial.paths.spans / "master_worker-0" / f"0000000001{SUFFIX}").write_bytes(b"\x00\xff no header")
    (trial.paths.spans / "empty-0").mkdir()
    (trial.paths.spans / "empty-0" / f"0000000000{SUFFIX}").touch()
    assert len(read_timeline(trial.paths.spans).spans) == whole


def test_lost_spans_are_counted(tmp_path: Path) -> None:
    trial = MadeUpTrial(tmp_path)
    trial.spans("master_worker/0", [raw("step", 0, 5), raw("lost", 5, 5, spans=2)])
    trial.spans("model_worker/0", [raw("lost", 6, 6, spans=5)])
    assert read_timeline(trial.paths.spans).lost == 7


def test_bytes_of_a_window_are_estimated(tmp_path: Path) -> None:
    """The first segment lasts for 100 s, of which the window has a quarter."""
    trial = MadeUpTrial(tmp_path)
    first = trial.spans("master_worker/0", [raw("step", k, k + 1, f"step/{k}") for k in range(100)])
    last = trial.spans("master_worker/0", [raw("step", 100, 101, "step/100")], segment=1)
    os.utime(last, (START + 200, START + 200))
    assert bytes_of(trial.paths.spans, (START + 50, START + 75)) == round(first.stat().st_size / 4)
    assert bytes_of(trial.paths.spans, (START - 50, START + 999)) == first.stat().st_size + last.stat().st_size
