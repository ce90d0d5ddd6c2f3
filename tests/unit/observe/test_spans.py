"""Tests of ``realsys.observe.spans``: what a process writes, its bounds, and what survives its death."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from realsys.observe import spans
from realsys.observe.spans import LOST, MOST_QUEUED, SPANS, Phases, Recorder, span
from realsys.observe.step_log import Event, EventLog, read_events, restarts_in_steps
from realsys.observe.timeline.clocked_spans import read_timeline, segments_of

ROOT = Path(spans.__file__).parents[2]


@pytest.fixture
def recording(tmp_path):
    spans.start(tmp_path / "spans" / "worker-0", "worker/0", "1", 1 << 20)
    yield tmp_path / "spans"
    spans.stop()


def test_span_is_written_with_its_facts(recording):
    with span("reward", "0000000001.0/2", judge="math") as reward:
        reward.facts["correct"] = True
    spans.stop()
    (read,) = read_timeline(recording).spans
    assert (read.process, read.name, read.unit) == ("worker/0", "reward", "0000000001.0/2")
    assert read.facts == {"judge": "math", "correct": True}
    assert 0 <= read.seconds < 60


def test_block_that_raises_is_recorded(recording):
    with pytest.raises(ValueError, match="no verdict"), span("reward"):
        raise ValueError("no verdict")
    spans.stop()
    assert [read.name for read in read_timeline(recording).spans] == ["reward"]


def test_phases_follow_each_other(recording):
    phases = Phases("r#0", "queue", spans.now() - 1000)
    phases.enter("prefill")
    phases.enter("decode")
    phases.enter("", tokens=5)
    spans.stop()
    read = read_timeline(recording).spans
    assert [one.name for one in read] == ["queue", "prefill", "decode"]
    assert [one.end for one in read[:-1]] == [one.begin for one in read[1:]]
    assert read[-1].facts == {"tokens": 5}


def test_nothing_is_recorded_before_start(tmp_path):
    with span("reward"):
        spans.mark("grant")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_killed_process_keeps_flushed_spans(tmp_path):
    """A SIGKILL in the middle of a line loses that line only."""
    program = (
        "import sys, time; from pathlib import Path; from realsys.observe import spans\n"
        "spans.start(Path(sys.argv[1]), 'worker/0', '1', 1 << 20)\n"
        "spans.mark('grant', 'first'); spans.flush()\n"
        "spans._recorder._file.write(b'[[\"grant\",12'); print('ready', flush=True); time.sleep(60)"
    )
    folder = tmp_path / "spans" / "worker-0"
    child = subprocess.Popen([sys.executable, "-c", program, str(folder)], cwd=ROOT, stdout=subprocess.PIPE)
    with child.stdout:
        child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.wait()
    timeline = read_timeline(tmp_path / "spans")
    assert [read.unit for read in timeline.spans] == ["first"]
    assert timeline.unread == 1


def test_folder_stays_below_its_limit(tmp_path):
    """Also over several incarnations, whose segments share the limit; the newest spans stay."""
    limit = 40_000
    for incarnation in range(3):
        recorder = Recorder(tmp_path, "worker/0", str(incarnation), limit)
        for number in range(2_000):
            recorder.record(("call", 1000 * incarnation + number, 5, f"step/{incarnation}-{number}", {"call": "train"}))
            if number % 20 == 0:
                recorder.flush()
                assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= limit
        recorder.stop()
    newest = segments_of(tmp_path)[-1].path.read_text().splitlines()[-1]
    assert "step/2-1999" in newest


def test_short_lives_push_out_no_long_segment(tmp_path):
    """A process that dies at once, again and again, keeps the spans of its first life."""
    folder = tmp_path / "spans" / "worker-0"
    for incarnation in range(20):
        recorder = Recorder(folder, "worker/0", str(incarnation), 1 << 20)
        recorder.record(("call", incarnation * 10**9, 1, f"step/{incarnation}", None))  # each start reads its clocks
        recorder.stop()
    assert [read.unit for read in read_timeline(tmp_path / "spans").spans] == [f"step/{n}" for n in range(20)]


def test_full_queue_counts_what_it_drops(tmp_path):
    recorder = Recorder(tmp_path / "spans" / "worker-0", "worker/0", "1", 1 << 24)
    for number in range(MOST_QUEUED + 7):
        recorder.record(("call", number, 1, "", None))
    recorder.stop()
    timeline = read_timeline(tmp_path / "spans")
    assert (len(timeline.named("call")), timeline.lost) == (MOST_QUEUED, 7)


def test_disk_error_ends_recording_only(tmp_path, caplog):
    (tmp_path / "worker-0").write_text("a file is in the place of the folder")
    recorder = Recorder(tmp_path / "worker-0", "worker/0", "1", 1 << 20)
    for _ in range(3):
        recorder.record(("call", 0, 1, "", None))
        recorder.flush()
    assert [record.message.partition(":")[0] for record in caplog.records] == ["no further spans of this process"]
    recorder.record(("call", 0, 1, "", None))
    assert not recorder._queue  # it would keep them for the whole run


def test_fact_that_is_no_json_ends_recording_only(tmp_path):
    recorder = Recorder(tmp_path / "worker-0", "worker/0", "1", 1 << 20)
    recorder.record(("call", 0, 1, "", {"bad": object()}))
    recorder.flush()
    recorder.flush()


@pytest.mark.processes
def test_forked_child_records_nothing(recording):
    child = os.fork()
    if child == 0:
        with span("reward", "of the child"):
            pass
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with span("reward", "of the parent"):
        pass
    spans.stop()
    assert [read.unit for read in read_timeline(recording).spans] == ["of the parent"]


def test_recorded_names_are_described():
    """Every name in the source is in SPANS, and none in SPANS is unused."""
    call = r"\bspan\(|spans\.add\(|spans\.mark\(|(?:spans|phases)\.enter\(|Phases\(f\"[^\"]*\", |spans\.name = "
    pattern = re.compile(rf"(?:{call})\s*\"([a-z]+)\"")
    used: set[str] = set()
    for folder in ("realsys", "workers", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.parent.name not in {"telemetry", "timeline", "picture"}:
                used |= set(pattern.findall(path.read_text(encoding="utf-8")))
    requests = {"call", "copy", "write", "save", "transfer"}  # to ModelWorkers
    assert used | requests | {LOST} == set(SPANS), used ^ set(SPANS)


# ---- Events of a trial: written, read, and placed on an axis of steps


def test_events_are_read_in_their_order(tmp_path):
    path = tmp_path / "events.jsonl"
    assert read_events(path) == []
    log = EventLog(path)
    log.add("start", "9 processes")
    log.add("restart", "rollout_worker/0 was killed", "rollout_worker/0")
    assert [(event.kind, event.process) for event in read_events(path)] == [
        ("start", ""),
        ("restart", "rollout_worker/0"),
    ]


def test_records_of_another_form_are_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind":"new_kind","time":1.0,"text":""}\n{"kind":"note"}\n{"kind":"no')
    EventLog(path).add("stop", "done: it ended on the torn line")
    EventLog(path).add("stop", "done")
    assert [event.text for event in read_events(path)] == ["done"]


def test_full_disk_loses_events_only(tmp_path):
    EventLog(tmp_path / "no_folder" / "events.jsonl").add("note", "lost")


def test_restart_lies_between_two_steps():
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
