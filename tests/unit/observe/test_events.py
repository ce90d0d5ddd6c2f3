"""Events of a trial: written, read, and placed on an axis of steps."""

from __future__ import annotations

from pathlib import Path

from realsys.observe.step_log import Event, EventLog, read_events, restarts_in_steps


def test_events_are_read_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_events(path) == []
    log = EventLog(path)
    log.add("start", "9 processes")
    log.add("restart", "rollout_worker/0 was killed", "rollout_worker/0")
    assert [(event.kind, event.process) for event in read_events(path)] == [
        ("start", ""),
        ("restart", "rollout_worker/0"),
    ]


def test_records_of_another_form_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind":"new_kind","time":1.0,"text":""}\n{"kind":"note"}\n{"kind":"no')
    EventLog(path).add("stop", "done: it ended on the torn line")
    EventLog(path).add("stop", "done")
    assert [event.text for event in read_events(path)] == ["done"]


def test_full_disk_loses_events_only(tmp_path: Path) -> None:
    EventLog(tmp_path / "no_folder" / "events.jsonl").add("note", "lost")


def test_restart_lies_between_two_steps() -> None:
    records = [{"kind": "train", "step": step, "time": 10.0 * step} for step in (1, 2, 3)]
    events = [
        Event(1.0, "start", ""),
        Event(5.0, "restart", "", "rollout_worker/0"),
        Event(15.0, "note", ""),
        Event(25.0, "start", ""),
    ]
    assert [(step, mark.kind) for step, mark in restarts_in_steps(events, records)] == [
        (0.5, "restart"),
        (2.5, "start"),
    ]
