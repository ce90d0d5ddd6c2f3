"""Timelines: why a run waits, clocks of hosts, names of units, and the trace for ui.perfetto.dev."""

import gzip
import json
import os
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.errors import ConfigError
from realsys.generation.client import SamplingSpec
from realsys.observe.spans import SUFFIX
from realsys.observe.step_log import EventLog
from realsys.observe.timeline.clocked_spans import (
    TimelineSpan,
    attempt_of,
    bytes_of,
    completion_of,
    number_of,
    offsets_of,
    read_timeline,
)
from realsys.observe.timeline.perfetto import Wanted, lanes_of, write_trace
from realsys.observe.timeline.why import (
    PARTS,
    WAITS,
    Facts,
    ServerUse,
    StepTime,
    Ways,
    WhyReport,
    WorkerUse,
    advice,
    bottleneck,
    explain,
    life_of_groups,
    parts_of_wait,
    sentence,
    server_use,
    split,
    step_times,
    sum_of,
    ways_of,
    worker_use,
)
from realsys.rollout.resumable_engine import EngineCall
from realsys.types import Ticket
from tests.support.timelines.made_up import START, MadeUpTrial, broken_rules, raw, small_trial

_STEP = {"wait": 4.0, "inf": 1.0, "train": 4.0, "save": 0.5, "publish": 0.25, "checkpoint": 0.25}


def _time(**parts):
    return StepTime(1, 0.0, {**dict.fromkeys(PARTS, 0.0), **parts})


def _facts(waits, **parts):
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
            {"wait": 20.0, "train": 30.0, "switch": 50.0},
            "switch-bound: the trainer has a batch, and waits for shared devices, 50 % of the time",
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
def test_sentence_names_the_slower_side(parts, expected):
    assert sentence(_time(**parts)) == expected


def test_sentence_has_the_percentages_of_the_parts():
    """Each rounded alone, the calls would be 98 %, and the parts 101 % together."""
    time = _time(wait=0.4, train=97.56, copy=0.68, publish=0.68, other=0.68)
    assert dict(time.percents) == dict.fromkeys(PARTS, 0) | {"train": 97, "copy": 1, "publish": 1, "other": 1}
    assert sentence(time) == "training-bound: calls take 97 % of the time, and the trainer waits 0 %"


def test_parts_of_the_wait_add_up_to_its_percentage():
    time = _time(wait=30.6, train=60.7, copy=8.7)
    report = WhyReport([], time, {"decode": 10.2, "reward": 10.2, "ticket": 10.2})
    assert time.percents["wait"] == 30
    assert report.wait_percents == {"decode": 10, "reward": 10, "ticket": 10}


def test_bottleneck_looks_at_the_last_steps(tmp_path):
    trial = MadeUpTrial(tmp_path)
    assert bottleneck(trial.paths) == ""
    trial.steps(*[{"wait": 9.0, "train": 1.0}] * 30, *[{"wait": 0.0, "train": 1.0}] * 20)
    assert bottleneck(trial.paths).startswith("training-bound: calls take 100 %")


def test_bottleneck_reads_the_end_of_a_long_log(tmp_path):
    """The first record that it reads may be cut; a half-written last one is no record."""
    trial = MadeUpTrial(tmp_path)
    trial.steps(*[{"wait": 0.0, "train": 1.0}] * 5000, *[{"wait": 9.0, "train": 1.0}] * 20)
    with trial.paths.steps.open("ab") as log:
        log.write(b'{"kind":"train","step":99')
    assert bottleneck(trial.paths).startswith("generation-bound: the trainer waits 90 %")


def test_parts_of_a_step_add_up_to_its_time():
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
def test_time_of_a_restart_is_no_part_of_a_step(again):
    def train(step, time):
        return {"kind": "train", "time": time, "step": step, "seconds": {**_STEP, "total": 10.0}}

    times = step_times([train(1, 100.0), {**again, "time": 500.0}, train(2, 5000.0)])
    assert [time.seconds for time in times] == [10.0, 10.0]


def test_unreadable_times_are_left_out():
    records = [{"kind": "train", "step": 1}, {"kind": "train", "step": "x", "seconds": {}, "time": 1.0}]
    assert step_times(records) == []


def test_report_splits_the_wait(tmp_path):
    report = explain(small_trial(tmp_path).paths)
    assert report.covered == 1
    assert sum(report.waits.values()) == pytest.approx(report.time.parts["wait"])
    assert max(report.waits, key=lambda name: report.waits[name]) == "decode"
    assert report.sentence.startswith("generation-bound")
    assert report.advice[0].startswith("batches wait for their last completions")


def test_report_without_spans_has_step_times(tmp_path):
    trial = MadeUpTrial(tmp_path)
    trial.steps(_STEP, _STEP)
    report = explain(trial.paths)
    assert (report.covered, report.waits) == (0, {})
    assert report.time.seconds == pytest.approx(20.0)
    assert report.advice[0].startswith("the trainer waits for generation")


def test_report_takes_chosen_steps(tmp_path):
    trial = MadeUpTrial(tmp_path)
    trial.steps(*[{"train": float(step)} for step in range(1, 6)])
    assert [time.step for time, _ in explain(trial.paths, 2, 3).steps] == [2, 3]
    with pytest.raises(ConfigError, match="the step log has steps 1 to 5"):
        explain(trial.paths, 8)


def test_trial_without_a_step_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no train step has ended"):
        explain(MadeUpTrial(tmp_path).paths)


def test_report_of_a_large_run_reads_fewer_steps(tmp_path, monkeypatch):
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
def test_advice_begins_with_the_largest_wait(waits, cause):
    first = advice(_facts(waits, wait=50.0, train=50.0))[0]
    assert cause in first
    assert first.endswith("(gains at most 40 %)")


def test_changing_devices_is_a_cause_of_its_own():
    facts = replace(_facts({}, switch=30.0, train=60.0, wait=10.0), steps=10)
    (line,) = [line for line in advice(facts) if "change hands" in line]
    assert line.startswith("the devices change hands: 3.0 s of 10.0 s per step")
    assert "max_staleness" in line and line.endswith("(gains at most 30 %)")


def test_slow_trainer_is_advised_more_devices():
    (line,) = advice(_facts({}, wait=1.0, train=99.0))
    assert line.startswith("training is the slower side")


def test_report_is_json(tmp_path):
    from realsys.launch.commands.why import as_record

    record = msgspec.json.decode(msgspec.json.encode(as_record(explain(small_trial(tmp_path).paths))))
    assert record["steps"][0]["end"] == START + 15
    assert record["servers"]["servers"] == 1


# ---- exchanges between hosts put their clocks together


def _call(begin, end, number=0):
    return TimelineSpan("rollout_worker/0", "generate", begin, end, f"000000000{number}.0/0", {"call": 0})


def _served(begin, end, number=0):
    return TimelineSpan("generation_server/0", "decode", begin, end, f"000000000{number}.0.0.0.0#0", {})


def test_clocks_that_obey_all_exchanges_stay():
    offsets = offsets_of({"a": [_call(1.0, 9.0)], "b": [_served(1.2, 8.8)]})
    assert offsets["b"].seconds == 0.0
    assert offsets["b"].error == pytest.approx(0.2)


@settings(deadline=None)
@given(skew=st.floats(-100, 100), delays=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=9))
def test_skewed_clock_is_moved_within_its_error(skew, delays):
    """The correction brings back the true times but for its own bound on the error."""
    calls = [_call(10.0 * k, 10.0 * k + 5, k) for k in range(len(delays))]
    served = [
        _served(10.0 * k + before + skew, 10.0 * k + 5 - after + skew, k) for k, (before, after) in enumerate(delays)
    ]
    offset = offsets_of({"a": calls, "b": served})["b"]
    assert offset.error is not None
    assert abs(offset.seconds + skew) <= offset.error + 1e-6
    assert offset.error <= 2.0 + 1e-6


def test_host_without_exchange_has_no_bound():
    offsets = offsets_of({"a": [_call(1.0, 9.0)], "b": [_served(1.2, 8.8, 5)]})
    assert offsets["b"].error is None


def test_chain_of_hosts_is_corrected():
    """Host c exchanges with b only, and b with the manager's host a."""
    update = {"server": "generation_server/0"}
    spans = {
        "a": [TimelineSpan("gserver_manager/0", "update", 0.0, 2.0, "version/1", update)],
        "b": [TimelineSpan("generation_server/0", "stage", 50.1, 51.9, "version/1", {}), _served(51.0, 53.0)],
        "c": [_call(-49.1, -46.9)],
    }
    offsets = offsets_of(spans)
    assert offsets["b"].seconds == pytest.approx(-50.0, abs=0.11)
    assert offsets["c"].seconds == pytest.approx(50.0, abs=0.31)


@pytest.mark.parametrize("wrong", [0.0, 0.7, -30.0])
def test_timeline_of_two_hosts_is_one(tmp_path, wrong):
    """The trainer's host has the reference clock; the other one is wrong by up to half a minute."""
    timeline = read_timeline(small_trial(tmp_path, {"b": wrong}).paths.spans)
    (push,) = timeline.named("push")
    (receive,) = timeline.named("receive")
    assert push.begin <= receive.begin <= push.end
    assert push.end == pytest.approx(START + 10.1, abs=0.6)


def test_repeated_steps_move_no_clock():
    """Steps 1 and 2 were trained again 100 s later, under the same names."""
    times = [(1, 0.0), (2, 10.0), (1, 100.0), (2, 110.0), (3, 120.0)]
    calls = [TimelineSpan("master_worker/0", "call", t, t + 5, f"step/{k}", {"call": "actor_train"}) for k, t in times]
    served = [
        TimelineSpan("model_worker/0", "call", t + 1, t + 4, f"step/{k}", {"call": "actor_train"}) for k, t in times
    ]
    offset = offsets_of({"a": calls, "b": served})["b"]
    assert offset.seconds == 0.0
    assert offset.error == pytest.approx(1.0)


# ---- Traces: spans of a row nest


_TIMES = st.integers(0, 40)


def _span(name, begin, end, unit="", process="rollout_worker/0"):
    return TimelineSpan(process, name, begin, end, unit, {})


def _ordered(spans):
    return sorted(spans, key=lambda span: (span.begin, -span.end))


_NAMES = st.sampled_from(["episode", "generate", "call", "step", "hold"])
_UNITS = st.sampled_from(["", "1.0/0", "1.0/1"])
_PROCESSES = st.sampled_from(["master_worker/0", "model_worker/0"])


@settings(deadline=None)
@given(st.lists(st.tuples(_NAMES, _TIMES, _TIMES, _UNITS), max_size=15), _PROCESSES)
def test_spans_of_a_row_nest(drawn, process):
    spans = [_span(name, begin, begin + length, unit, process) for name, begin, length, unit in drawn]
    ends: dict[object, list[float]] = {}
    placed = lanes_of(_ordered(spans))
    for span, lane in placed:
        open_ends = ends.setdefault(lane, [])
        while open_ends and open_ends[-1] <= span.begin:
            open_ends.pop()
        assert not open_ends or span.end <= open_ends[-1]
        open_ends.append(span.end)
    assert len(placed) == len(spans)


def test_episode_stays_on_one_row():
    """Two episodes overlap; each has its row with all of its spans."""
    spans = [
        _span("episode", 0, 9, "1.0/0"),
        _span("generate", 1, 4, "1.0/0"),
        _span("reward", 4, 9, "1.0/0"),
        _span("episode", 2, 8, "1.0/1"),
        _span("generate", 2, 7, "1.0/1"),
    ]
    rows = {(span.unit, lane) for span, lane in lanes_of(_ordered(spans))}
    assert rows == {("1.0/0", ("episodes", 0)), ("1.0/1", ("episodes", 1))}


# ---- segments, windows, damaged files


def test_trial_without_spans_is_empty(tmp_path):
    assert list(read_timeline(tmp_path / "spans").spans) == []


def test_window_keeps_what_overlaps_it(tmp_path):
    trial = MadeUpTrial(tmp_path)
    trial.spans("master_worker/0", [raw("step", 0, 5, "step/1"), raw("step", 5, 9, "step/2")])
    trial.spans("master_worker/0", [raw("step", 20, 25, "step/3"), raw("step", 25, 40, "step/4")], segment=1)
    read = read_timeline(trial.paths.spans, (START + 6, START + 21)).spans
    assert [span.unit for span in read] == ["step/2", "step/3"]


def test_earlier_segments_are_not_read(tmp_path):
    """A segment that ended before the window is skipped by the next one's header, however large it is."""
    trial = MadeUpTrial(tmp_path)
    old = trial.spans("master_worker/0", [raw("step", 0, 5, "step/1")])
    trial.spans("master_worker/0", [raw("step", 50, 55, "step/2")], segment=1)
    with old.open("ab") as file:
        file.write(b"not json\n")
    assert read_timeline(trial.paths.spans, (START + 52, START + 53)).unread == 0
    assert read_timeline(trial.paths.spans).unread == 1


def test_damaged_segment_costs_only_itself(tmp_path):
    trial = small_trial(tmp_path)
    whole = len(read_timeline(trial.paths.spans).spans)
    (trial.paths.spans / "master_worker-0" / f"0000000001{SUFFIX}").write_bytes(b"\x00\xff no header")
    (trial.paths.spans / "empty-0").mkdir()
    (trial.paths.spans / "empty-0" / f"0000000000{SUFFIX}").touch()
    assert len(read_timeline(trial.paths.spans).spans) == whole


def test_lost_spans_are_counted(tmp_path):
    trial = MadeUpTrial(tmp_path)
    trial.spans("master_worker/0", [raw("step", 0, 5), raw("lost", 5, 5, spans=2)])
    trial.spans("model_worker/0", [raw("lost", 6, 6, spans=5)])
    assert read_timeline(trial.paths.spans).lost == 7


def test_bytes_of_a_window_are_estimated(tmp_path):
    """The first segment lasts for 100 s, of which the window has a quarter."""
    trial = MadeUpTrial(tmp_path)
    first = trial.spans("master_worker/0", [raw("step", k, k + 1, f"step/{k}") for k in range(100)])
    last = trial.spans("master_worker/0", [raw("step", 100, 101, "step/100")], segment=1)
    os.utime(last, (START + 200, START + 200))
    assert bytes_of(trial.paths.spans, (START + 50, START + 75)) == round(first.stat().st_size / 4)
    assert bytes_of(trial.paths.spans, (START - 50, START + 999)) == first.stat().st_size + last.stat().st_size


# ---- the names of a completion on a server lead to its episode


@pytest.mark.parametrize(
    ("unit", "episode", "call"),
    [
        ("0000000105.0.2.0.0#3", "0000000105.0/5", 0),  # the fourth completion of a merged first call
        ("0000000105.1.2.0.7.3#0", "0000000105.1/5", 0),  # the same one, continued elsewhere
        ("0000000105.0.4.6.0#0", "0000000105.0/4", 6),
        ("eval-step-10.aime-000012.0.0.1.0#0", "eval-step-10.aime-000012.0/0", 1),
    ],
)
def test_completion_leads_to_its_episode(unit, episode, call):
    completion = completion_of(unit)
    assert (completion.unit, completion.call) == (episode, call)
    assert attempt_of(unit) == episode.partition("/")[0]


@pytest.mark.parametrize("unit", ["", "f3a9c0#0", "step/4", "version/-1", "first00000002#0"])
def test_other_units_are_of_no_attempt(unit):
    assert completion_of(unit) is None
    assert attempt_of(unit) == ""


def test_request_ids_are_read_back():
    """The form that RolloutWorkers write, with the suffix of a trip and of a server."""
    call = EngineCall(Ticket("0000000003", 2, 0), "1.4", [1], SamplingSpec(), 0)
    completion = completion_of(f"{call.rid}.0#0")
    assert (completion.attempt, completion.episode, completion.call) == (call.ticket.unit, 1, 4)


def test_numbers_are_of_one_kind():
    assert number_of("step/12", "step") == 12
    assert number_of("step/12", "version") is None
    assert number_of("0000000003.2/1", "step") is None


# ---- what a batch waited for, how busy both sides were


_INSIDE = ("generate", "queue", "prefill", "decode", "reward", "tool", "route", "episode")


def _step(ways_from):
    (step,) = [span for span in ways_from if span.name == "step"]
    (wait,) = [span for span in ways_from if span.name == "wait"]
    return step, wait


def test_wait_is_split_by_the_last_episode(tmp_path):
    spans = list(read_timeline(small_trial(tmp_path).paths.spans).spans)
    step, wait = _step(spans)
    parts = parts_of_wait(wait, step, ways_of(spans))
    expected = {"ticket": 0.5, "queue": 1.0, "prefill": 1.0, "decode": 4.0, "reward": 2.0, "push": 1.0, "claim": 0.5}
    assert parts == pytest.approx(expected)


def test_last_attempt_of_a_ticket_counts(tmp_path):
    """A reissued ticket was pushed by its second attempt, whose begin is what the trainer waited for."""
    spans = list(read_timeline(small_trial(tmp_path).paths.spans).spans)
    first = [span for span in spans if span.unit.startswith("0000000007.0") and span.name in {"rollout", "grant"}]
    spans += [span._replace(unit="0000000007.1", begin=span.begin + 1, end=span.end + 0.2) for span in first]
    spans.append(TimelineSpan("rollout_worker/0", "push", START + 10.0, START + 10.3, "0000000007.1", {}))
    step, wait = _step(spans)
    parts = parts_of_wait(wait, step, ways_of(spans))
    assert parts["ticket"] == pytest.approx(1.5)
    assert "decode" not in parts


def test_wait_before_a_lost_rollout_is_unknown(tmp_path):
    """The RolloutWorker was killed after its push: it has recorded its episodes, but not the rollout."""
    spans = [span for span in read_timeline(small_trial(tmp_path).paths.spans).spans if span.name != "rollout"]
    step, wait = _step(spans)
    parts = parts_of_wait(wait, step, ways_of(spans))
    assert "ticket" not in parts
    assert parts["unknown"] == pytest.approx(0.5)
    assert parts["decode"] == pytest.approx(4.0)
    assert life_of_groups([(step, wait)], ways_of(spans)) == {}


def test_batch_without_spans_is_unknown():
    step = TimelineSpan("master_worker/0", "step", 0, 5, "step/1", {"tickets": "1-3"})
    wait = step._replace(name="wait", end=2.0)
    assert parts_of_wait(wait, step, Ways()) == {"unknown": 2.0}


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(_INSIDE), st.floats(0, 20), st.floats(0, 10)), max_size=12),
    st.floats(0, 10),
    st.floats(0.001, 20),
)
def test_pieces_of_an_episode_add_up(drawn, begin, length):
    spans = [TimelineSpan("w", name, start, start + seconds, "", {}) for name, start, seconds in drawn]
    pieces = split(spans, begin, begin + length)
    assert sum(end - start for _, start, end in pieces) == pytest.approx(length)
    assert {name for name, _, _ in pieces} <= WAITS.keys()
    assert all(one[2] == other[1] for one, other in pairwise(pieces))


def test_use_of_servers(tmp_path):
    spans = read_timeline(small_trial(tmp_path).paths.spans).spans
    use = server_use(spans, (START, START + 10))
    assert (use.servers, use.most) == (1, 2)
    assert use.busy == pytest.approx(0.55)  # from 1.5 to 7
    assert use.running == pytest.approx(0.75)  # 2.5 s and 5 s
    assert use.queued == pytest.approx(0.15)
    assert server_use(spans, (START + 16, START + 18)).paused == pytest.approx(0.2)


def test_use_of_rollout_workers(tmp_path):
    use = worker_use(read_timeline(small_trial(tmp_path).paths.spans).spans, (START, START + 10))
    assert (use.workers, use.reasons) == (1, {})
    assert use.playing == pytest.approx(0.9)
    assert use.empty == pytest.approx(0.4)  # four places for one second


def test_life_of_a_group(tmp_path):
    spans = read_timeline(small_trial(tmp_path).paths.spans).spans
    life = life_of_groups([_step(list(spans))], ways_of(spans))
    assert life["buffered"] == pytest.approx(0.5)
    assert life["trained"] == pytest.approx(4.5)
    assert sum(life.values()) == pytest.approx(14.0)  # from its grant to the end of its step


def test_life_leaves_out_groups_with_lost_spans(tmp_path):
    """Spans were read from a moment on at which the group ran already."""
    spans = read_timeline(small_trial(tmp_path).paths.spans).spans
    assert life_of_groups([_step(list(spans))], ways_of(spans), since=START + 2.0) == {}


# ---- Traces: the file obeys the viewer's rules, and arrows follow episodes


def _events(path):
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    return events


def _way(events, episode):
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
def test_trace_obeys_the_rules(tmp_path, name):
    trial = small_trial(tmp_path / "trial", {"b": 0.4})
    EventLog(trial.paths.events).add("restart", "was killed by SIGKILL", "rollout_worker/0")
    written = write_trace(trial.paths, tmp_path / name)
    assert broken_rules(_events(tmp_path / name)) == []
    assert (written.spans, written.processes) == (30, 5)
    assert written.clock_error is not None
    assert written.clock_error < 0.5


def test_arrow_follows_an_episode_everywhere(tmp_path):
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


def test_steps_choose_a_window(tmp_path):
    trial = MadeUpTrial(tmp_path / "trial")
    trial.spans("master_worker/0", [raw("step", 10 * k, 10 * k + 9, f"step/{k}", tickets="") for k in range(5)])
    write_trace(trial.paths, tmp_path / "trace.json", Wanted(steps=(2, 3)))
    units = [event["args"]["unit"] for event in _events(tmp_path / "trace.json") if event["ph"] == "X"]
    assert units == ["step/2", "step/3"]
    with pytest.raises(ConfigError, match="the spans have steps 0 to 4"):
        write_trace(trial.paths, tmp_path / "trace.json", Wanted(steps=(7, None)))


def test_phases_end_with_the_chosen_steps(tmp_path):
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


def test_pause_of_an_undone_version_ends_no_arrow(tmp_path):
    """Version 1 was published, rolled back, and made again by the step to which the arrow leads."""
    trial = small_trial(tmp_path / "trial")
    trial.spans("generation_server/1", [raw("pause", 0.1, 0.2, "version/1")], "b")
    write_trace(trial.paths, tmp_path / "trace.json")
    assert _way(_events(tmp_path / "trace.json"), "0000000007.0/1")[-1] == ("generation_server", "pause")


@pytest.mark.parametrize("ticket", ["7", "0000000007", "0000000007.0", "0000000007.0/1"])
def test_ticket_chooses_its_spans(tmp_path, ticket):
    trial = small_trial(tmp_path / "trial")
    trial.spans("rollout_worker/1", [raw("rollout", 1.0, 5.0, "0000000008.0")], "b")
    write_trace(trial.paths, tmp_path / "trace.json", Wanted(ticket=ticket))
    events = _events(tmp_path / "trace.json")
    assert broken_rules(events) == []
    units = {event["args"].get("unit", "") for event in events if event["ph"] == "X"}
    assert {"0000000007.0", "0000000007.0/1", "step/1", "version/1"} <= units
    assert "0000000008.0" not in units


def test_unknown_ticket_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no span of this ticket"):
        write_trace(small_trial(tmp_path).paths, tmp_path / "trace.json", Wanted(ticket="99"))


def test_trial_without_spans_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"telemetry\.spans=false"):
        write_trace(MadeUpTrial(tmp_path).paths, tmp_path / "trace.json")


def test_large_timeline_needs_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("realsys.observe.timeline.perfetto._MOST_BYTES", 100)
    with pytest.raises(ConfigError, match="choose steps"):
        write_trace(small_trial(tmp_path).paths, tmp_path / "trace.json")
    write_trace(small_trial(tmp_path).paths, tmp_path / "trace.json", Wanted(steps=(1, 1)))


def test_ticket_belongs_to_its_last_step(tmp_path):
    """Step 5 was rolled back, and its ticket was trained again in step 4: its arrow leads there."""
    trial = small_trial(tmp_path / "trial")
    steps = [raw("step", 0.5, 16.0, "step/5", tickets="7"), raw("step", 20.0, 25.0, "step/4", tickets="7")]
    trial.spans("master_worker/0", steps)
    write_trace(trial.paths, tmp_path / "trace.json", Wanted(ticket="7"))
    units = {event["args"].get("unit") for event in _events(tmp_path / "trace.json") if event["ph"] == "X"}
    assert "step/4" in units
    assert "step/5" not in units
