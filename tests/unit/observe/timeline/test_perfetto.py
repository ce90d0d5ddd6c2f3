"""Tests of ``realsys.observe.timeline.perfetto``: the file obeys the viewer's rules, and arrows follow episodes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from realsys.errors import ConfigError
from realsys.observe.step_log import EventLog
from realsys.observe.timeline.perfetto import Wanted, write_trace
from tests.support.timelines.made_up import START, MadeUpTrial, raw, small_trial
from tests.support.timelines.trace_rules import broken_rules


def _events(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    return events


def _way(events: list[dict[str, Any]], episode: str) -> list[tuple[str, str]]:
    """Return (process, innermost span) of each point of an arrow."""
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    way = []
    for point in (event for event in events if event["ph"] in "stf" and event["name"] == episode):
        around = [
            event
            for event in events
            if event["ph"] == "X"
            and (event["pid"], event["tid"]) == (point["pid"], point["tid"])
            and event["ts"] <= point["ts"] < event["ts"] + event["dur"]
        ]
        way.append((names[point["pid"]].partition("/")[0], min(around, key=lambda event: event["dur"])["cat"]))
    return way


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_trace_obeys_the_rules(tmp_path: Path, name: str) -> None:
    trial = small_trial(tmp_path / "trial", {"b": 0.4})
    EventLog(trial.paths.events).add("restart", "was killed by SIGKILL", "rollout_worker/0")
    written = write_trace(trial.paths, tmp_path / name)
    assert broken_rules(_events(tmp_path / name)) == []
    assert (written.spans, written.processes) == (30, 5)
    assert written.clock_error is not None
    assert written.clock_error < 0.5


def test_arrow_follows_an_episode_everywhere(tmp_path: Path) -> None:
    write_trace(small_trial(tmp_path / "trial").paths, tmp_path / "trace.json")
    way = _way(_events(tmp_path / "trace.json"), "0000000007.0/1")
    assert [process for process, _ in way] == [
        "gserver_manager",
        *["rollout_worker"] * 3,
        *["generation_server"] * 3,
        *["rollout_worker"] * 2,
        "model_worker",
        "master_worker",
        "model_worker",
        "master_worker",
        "generation_server",
    ]
    assert [name for _, name in way][4:] == [
        *("queue", "prefill", "decode", "reward", "push", "receive", "wait", "call", "publish", "pause")
    ]


def test_steps_choose_a_window(tmp_path: Path) -> None:
    trial = MadeUpTrial(tmp_path / "trial")
    trial.spans("master_worker/0", [raw("step", 10 * k, 10 * k + 9, f"step/{k}", tickets="") for k in range(5)])
    write_trace(trial.paths, tmp_path / "trace.json", Wanted(steps=(2, 3)))
    units = [event["args"]["unit"] for event in _events(tmp_path / "trace.json") if event["ph"] == "X"]
    assert units == ["step/2", "step/3"]
    with pytest.raises(ConfigError, match="the spans have steps 0 to 4"):
        write_trace(trial.paths, tmp_path / "trace.json", Wanted(steps=(7, None)))


def test_phases_end_with_the_chosen_steps(tmp_path: Path) -> None:
    """Training has lasted for 1,000 s when step 2 begins: the picture of this step has none of them."""
    trial = MadeUpTrial(tmp_path / "trial")
    trial.spans("master_worker/0", [raw("step", 1000.0 * k, 1000.0 * k + 9, f"step/{k}", tickets="") for k in range(5)])
    phases = [
        {"kind": "phase", "phase": "train", "time": START},
        {"kind": "phase", "phase": "done", "time": START + 5000},
    ]
    trial.paths.steps.write_text("".join(json.dumps(phase) + "\n" for phase in phases))
    write_trace(trial.paths, tmp_path / "trace.json", Wanted(steps=(2, 2)))
    slices = [event for event in _events(tmp_path / "trace.json") if event["ph"] == "X"]
    assert {(event["name"], event["ts"], event["dur"]) for event in slices} == {("train", 0.0, 9e6), ("step", 0.0, 9e6)}


def test_pause_of_an_undone_version_ends_no_arrow(tmp_path: Path) -> None:
    """Version 1 was published, rolled back, and made again by the step to which the arrow leads."""
    trial = small_trial(tmp_path / "trial")
    trial.spans("generation_server/1", [raw("pause", 0.1, 0.2, "version/1")], "b")
    write_trace(trial.paths, tmp_path / "trace.json")
    assert _way(_events(tmp_path / "trace.json"), "0000000007.0/1")[-1] == ("generation_server", "pause")


@pytest.mark.parametrize("ticket", ["7", "0000000007", "0000000007.0", "0000000007.0/1"])
def test_ticket_chooses_its_spans(tmp_path: Path, ticket: str) -> None:
    trial = small_trial(tmp_path / "trial")
    trial.spans("rollout_worker/1", [raw("rollout", 1.0, 5.0, "0000000008.0")], "b")
    write_trace(trial.paths, tmp_path / "trace.json", Wanted(ticket=ticket))
    events = _events(tmp_path / "trace.json")
    assert broken_rules(events) == []
    units = {event["args"].get("unit", "") for event in events if event["ph"] == "X"}
    assert {"0000000007.0", "0000000007.0/1", "step/1", "version/1"} <= units
    assert "0000000008.0" not in units


def test_unknown_ticket_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no span of this ticket"):
        write_trace(small_trial(tmp_path).paths, tmp_path / "trace.json", Wanted(ticket="99"))


def test_trial_without_spans_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.spans=false"):
        write_trace(MadeUpTrial(tmp_path).paths, tmp_path / "trace.json")


def test_large_timeline_needs_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realsys.observe.timeline.perfetto._MOST_BYTES", 100)
    with pytest.raises(ConfigError, match="choose steps"):
        write_trace(small_trial(tmp_path).paths, tmp_path / "trace.json")
    write_trace(small_trial(tmp_path).paths, tmp_path / "trace.json", Wanted(steps=(1, 1)))


def test_ticket_belongs_to_its_last_step(tmp_path: Path) -> None:
    """Step 5 was rolled back, and its ticket was trained again in step 4: its arrow leads there."""
    trial = small_trial(tmp_path / "trial")
    steps = [
        raw("step", 0.5, 16.0, "step/5", tickets="7"),
        raw("step", 20.0, 25.0, "step/4", tickets="7"),
    ]
    trial.spans("master_worker/0", steps)
    write_trace(trial.paths, tmp_path / "trace.json", Wanted(ticket="7"))
    units = {event["args"].get("unit") for event in _events(tmp_path / "trace.json") if event["ph"] == "X"}
    assert "step/4" in units
    assert "step/5" not in units
