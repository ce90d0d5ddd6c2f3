"""The report of a run, from a step log of any length: against the same numbers from a list of all that holds; warnings
and curves that are made from it.
"""

import io
import itertools
import json
import math
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import pyplot
from rich.console import Console

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.launch.conclude import EVALUATION_KEYS, print_summary, saved_line, summarise
from realsys.launch.supervise.restart_policy import NO_CHECKPOINT, TrialOutcome
from realsys.observe.curves import draw_curves
from realsys.observe.evaluation_records import Tally, effective_size, estimate, pass_at_k, pooled, summarize, wilson
from realsys.observe.screen.progress import TIME_PARTS, Monitor, Record, TrialProgress, mean, number
from realsys.observe.step_log import StepTail
from realsys.observe.totals import CURVE_POINTS, END_STEPS, curve_points

STARTED, ENDED = 1000.0, 9000.0

values = st.one_of(st.none(), st.floats(-10, 10, width=32))
steps = st.fixed_dictionaries(
    {"kind": st.just("train"), "answer_tokens": st.integers(0, 500), "dropped_stale": st.integers(0, 3)},
    optional={
        "accuracy": values,
        "reward_mean": values,
        "length_mean": values,
        "train_tokens_per_s": values,
        "dropped_filtered": st.integers(0, 3),
        "length_biased": st.just(True),
        "untrained": st.dictionaries(st.sampled_from(["stale", "masked", "success_rate"]), st.floats(0, 0.3)),
        "seconds": st.dictionaries(st.sampled_from([*TIME_PARTS, "total"]), values),
        "staleness": st.fixed_dictionaries(
            {"mean": st.floats(0, 4), "min": st.integers(0, 2), "max": st.integers(2, 5)},
            optional={"histogram": st.dictionaries(st.sampled_from(["0", "1", "10"]), st.integers(1, 9))},
        ),
        "stats": st.fixed_dictionaries({"grad_norm_max": st.sampled_from([0.0, 0.5, None])}),
    },
)
events = st.one_of(
    steps,
    st.fixed_dictionaries({"kind": st.just("warmup")}),
    st.fixed_dictionaries({"kind": st.just("eval"), "accuracy": values, "problems": st.integers(1, 9)}),
    st.fixed_dictionaries({"kind": st.just("phase"), "phase": st.sampled_from(["train", "evaluate", "done"])}),
    st.fixed_dictionaries({"kind": st.just("recovered"), "back": st.integers(0, 6)}),
)


def log_of(happened):
    """What a MasterWorker would write: steps follow one another, a recovery goes ``back`` some of them."""
    records, step, warmed_up = [], 0, 0
    for number_, event in enumerate(happened):
        record = {**event, "time": STARTED - 50.0 + 10.0 * number_}
        match event["kind"]:
            case "train":
                step += 1
                record |= {"step": step, "total": 99}
            case "warmup":
                warmed_up += 1
                record |= {"step": warmed_up, "total": 99}
            case "eval":
                record |= {"step": step, "eval_id": ("before", "after", f"step-{step}")[number_ % 3]}
            case "recovered":
                step = step - record.pop("back")
                record["step"], step = max(step, -1), max(step, 0)
        records.append(record)
    return records


def append(paths, records):
    """Write records to the step log."""
    with paths.steps.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def what_holds(records):
    """A list from which every recovery takes what it undoes."""
    kept: list[dict[str, Any]] = []
    for record in records:
        if record["kind"] == "recovered":
            back = record["step"]
            kept = [
                old
                for old in kept
                if not (old["kind"] in ("train", "eval") and old["step"] > back)
                and not (old["kind"] == "warmup" and back < 0)
            ]
        kept.append(record)
    return kept


def straightforward(records):
    """The parts of the summary that come from the step log, from lists of all values."""
    held = what_holds(records)
    train: list[Record] = [record for record in held if record["kind"] == "train"]
    usual = [record for record in train if not record.get("length_biased")]
    ends = max(1, min(END_STEPS, len(usual or train) // 2))
    too_old = [sum(record.get("untrained", {}).get(reason, 0) for reason in ("stale", "masked")) for record in train]
    evals = {record["eval_id"]: record for record in held if record["kind"] == "eval"}
    phases = [(r["phase"], r["time"]) for r in held if r["kind"] == "phase" and r["time"] >= STARTED]
    seconds = {"total": ENDED - STARTED}
    for (name, began), until in zip(phases, [*(t for _, t in phases[1:]), ENDED], strict=False):
        if name != "done":
            seconds[name] = seconds.get(name, 0.0) + until - began
    histogram: dict[int, int] = {}
    for record in train:
        for lag, count in record.get("staleness", {}).get("histogram", {}).items():
            histogram[int(lag)] = histogram.get(int(lag), 0) + count
    now = sum(record["answer_tokens"] for record in train if record["time"] >= STARTED)
    before, after = (number(evals.get(name, {}), "accuracy") for name in ("before", "after"))
    return {
        "steps": len(train),
        "accuracy": {
            "before": before,
            "after": after,
            "gain": after - before if before is not None and after is not None else None,
            "problems": number(evals.get("after", evals.get("before", {})), "problems"),
            "train_first": mean((usual or train)[:ends], "accuracy"),
            "train_last": mean((usual or train)[-ends:], "accuracy"),
            "train_averaged": 0 if len(usual) == 1 else ends,
        },
        "evaluations": [{key: record.get(key) for key in EVALUATION_KEYS} for record in evals.values()],
        "seconds": seconds,
        "step_seconds": {part: mean(train, "seconds", part) for part in (*TIME_PARTS, "total")},
        "tokens": {
            "trained_answer_tokens": sum(record["answer_tokens"] for record in train),
            "end_to_end_per_s": now / seconds["train"] if now and seconds.get("train") else None,
            "train_per_s": mean(train, "train_tokens_per_s"),
        },
        "staleness": {
            "mean": mean(train, "staleness", "mean"),
            "max": max((record.get("staleness", {}).get("max", 0) for record in train), default=None),
            "max_staleness": Config().asynchronous.max_staleness,
            "histogram": {str(lag): histogram[lag] for lag in sorted(histogram)},
            "dropped": sum(record["dropped_stale"] for record in train),
            "filtered": sum(record.get("dropped_filtered", 0) for record in train),
            "tokens_too_old": sum(too_old) / len(train) if train else None,
        },
        "without_signal": sum(number(record, "stats", "grad_norm_max") == 0.0 for record in train),
        "recoveries": sum(record["kind"] == "recovered" for record in held),
    }


@settings(max_examples=200, deadline=None)
@given(st.lists(events, max_size=60))
def test_summary_says_what_a_straightforward_computation_says(happened):
    records = log_of(happened)
    with tempfile.TemporaryDirectory() as folder:
        paths = TrialPaths(Path(folder))
        append(paths, records)
        summary = summarise(Config(), paths, TrialOutcome("done", ""), started=STARTED, ended=ENDED)
    expected = straightforward(records)
    assert {name: summary[name] for name in expected} == expected


def trained(step):
    staleness = {"min": 1, "mean": 2.0, "max": 3 if step % 7 else 8}
    return {"kind": "train", "step": step, "reward_mean": float(step), "accuracy": None, "staleness": staleness}


def test_curves_have_a_point_for_every_step():
    points = list(curve_points([trained(step) for step in range(1, CURVE_POINTS + 1)], CURVE_POINTS))
    assert [point["step"] for point in points] == list(range(1, CURVE_POINTS + 1))
    assert points[6] == {"step": 7, "reward_mean": 7.0, "stale_mean": 2.0, "stale_min": 1, "stale_max": 8}


def test_length_biased_steps_are_marked_and_not_averaged():
    points = list(curve_points([trained(1) | {"length_biased": True}, trained(2)], 2))
    assert [point.get("length_biased") for point in points] == [1.0, None]
    many = [trained(step) | ({"length_biased": True} if step % 2 else {}) for step in range(1, 2 * CURVE_POINTS + 1)]
    [first, *_] = curve_points(many, len(many))
    assert first["reward_mean"] == 2.0 and "length_biased" not in first


def test_biased_steps_are_points_beside_the_line(tmp_path, monkeypatch):
    """Steps 1, 4 and 7 are biased, as after two starts; step 8 has no neighbour, so it is a point."""
    paths = TrialPaths(tmp_path)
    append(paths, [trained(step) | {"length_biased": step in (1, 4, 7)} for step in range(1, 9)])
    with monkeypatch.context() as patch:
        patch.setattr(pyplot, "close", lambda figure: None)
        draw_curves(Config(), paths)
    reward, *_ = pyplot.gcf().axes
    pyplot.close()
    drawn = [
        (line.get_linestyle(), line.get_fillstyle(), [int(x) for x, y in line.get_xydata() if y == y])
        for line in reward.lines
    ]
    assert drawn == [
        ("-", "full", [2, 3, 5, 6, 8]),
        ("None", "full", [8]),
        ("--", "full", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("None", "none", [1, 4, 7]),
    ]


def test_run_without_signal_is_warned_of_once(tmp_path):
    """While it runs, and in its summary."""
    config = Config.model_validate({"train": {"ppo": {"advantage": {"mean": "group"}}}})
    paths, screen = TrialPaths(tmp_path), Mock()
    monitor = Monitor(config, paths, TrialProgress(), screen, StepTail(paths.steps))
    append(paths, [{"kind": "eval", "eval_id": "before", "accuracy": 0.25, "step": 0}])
    for step in range(1, 6):
        append(paths, [trained(step) | {"signal": {"equal": 1.0}}])
        monitor.read_steps()
    [[warning]] = [call.args for call in screen.note.call_args_list]
    assert "of the last 3 steps carry no signal" in warning and "accuracy before training 25.0%" in warning
    summary = summarise(config, paths, TrialOutcome("done", ""), started=STARTED, ended=ENDED)
    print_summary(Console(file=(out := io.StringIO())), summary)
    assert f"weak signal           {warning}\n" in out.getvalue()


@pytest.mark.parametrize("count", [CURVE_POINTS + 1, 10 * CURVE_POINTS - 1])
def test_curves_of_long_run_are_means(count):
    """And records that are no step, or have no number, make no point."""
    records = [{"kind": "phase"}, {"kind": "train"}, *(trained(step) for step in range(1, count + 1))]
    points = list(curve_points(iter(records), count))
    assert CURVE_POINTS / 2 <= len(points) <= CURVE_POINTS
    width = -(-count // CURVE_POINTS)
    assert points[0]["step"] == points[0]["reward_mean"] == (1 + width) / 2
    assert points[-1]["step"] <= count and "accuracy" not in points[0]
    assert {point["stale_max"] for point in points} <= {3, 8} and max(point["stale_max"] for point in points[:7]) == 8


# ---- Numbers of evaluations: unbiased pass@k, intervals with the problems as clusters


TALLIES = st.lists(st.integers(0, 4).map(lambda right: Tally(4, right)), min_size=1, max_size=40)


@given(st.integers(1, 9), st.data())
def test_pass_at_k_counts_all_choices(n, data):
    """The mean over every choice of k of the n completions: at least one of them is right."""
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (10, 3, 1, 0.3),
        (10, 3, 5, 1 - 21 / 252),
        (200, 1, 100, 0.5),
        (5, 0, 5, 0.0),
        (5, 5, 1, 1.0),
        (4, 2, 3, 1.0),
        (100_000, 3, 40_000, 1 - math.prod((60_000 - i) / (100_000 - i) for i in range(3))),
    ],
)
def test_pass_at_k_has_known_values(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4), (0, 0, 1)])
def test_impossible_pass_at_k_is_refused(n, c, k):
    with pytest.raises(ValueError, match="must be in"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("right", "size", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),  # Newcombe 1998, Statistics in Medicine 17, method 3 (Wilson)
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_wilson_interval_has_published_values(right, size, low, high):
    assert wilson(right / size, size) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 60), st.data())
def test_one_completion_per_problem_is_wilson(count, data):
    right = data.draw(st.integers(0, count))
    values = [1.0] * right + [0.0] * (count - right)
    found = estimate(values, count)
    assert (found.low, found.high) == pytest.approx(wilson(right / count, count))


@given(TALLIES)
def test_interval_holds_the_mean(tallies):
    found = summarize(tallies, [2, 4])
    for value in found.pass_at.values():
        assert 0.0 <= value.low <= value.value + 1e-12 and value.value <= value.high + 1e-12 <= 1.0 + 1e-9
        assert value.high > value.low, "no number of problems proves anything exactly"
    values = [found.pass_at[k].value for k in (1, 2, 4)]
    assert values == sorted(values)


@given(TALLIES)
def test_repeated_completions_prove_no_more(tallies):
    """Completions that all agree with each other are worth as much as one of each problem."""
    agreeing = [Tally(4, 4 * (tally.right > 1)) for tally in tallies]
    once = [Tally(1, int(tally.right > 1)) for tally in tallies]
    for_four, for_one = summarize(agreeing).accuracy, summarize(once).accuracy
    assert (for_four.low, for_four.high) == pytest.approx((for_one.low, for_one.high))


def test_spread_within_problems_narrows_the_interval():
    """Four completions that are independent of their problem count like four problems."""
    mixed = summarize([Tally(4, 2)] * 100).accuracy
    assert (mixed.low, mixed.high) == pytest.approx(wilson(0.5, 400))
    assert mixed.stderr == 0.0 and mixed.margin == pytest.approx(0.0488, abs=1e-4)


def test_standard_error_is_the_one_of_problem_means():
    found = estimate([1.0, 0.5, 0.0, 0.5], 8)
    assert found.value == 0.5 and found.stderr == pytest.approx(math.sqrt((0.25 + 0.25) / 3 / 4))


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 100), st.integers(1, 16))
def test_effective_size_is_bounded(mean, variance, problems, samples):
    assert problems <= effective_size(mean, variance, problems, problems * samples) <= problems * samples


def test_problems_without_verdict_do_not_count():
    found = summarize([Tally(0, 0), Tally(2, 1)], [2])
    assert (found.problems, found.completions) == (1, 2) and found.pass_at[1].value == 0.5
    assert summarize([Tally(0, 0)]).accuracy is None


def test_pass_at_k_needs_k_verdicts_everywhere():
    assert list(summarize([Tally(4, 1), Tally(3, 1)], [2, 3, 4]).pass_at) == [1, 2, 3]


@given(TALLIES)
def test_pooled_share_of_equal_problems_is_their_mean(tallies):
    of_problems = summarize(tallies).pass_at[1]
    together = pooled([*tallies, Tally(0, 0)])
    assert together is not None
    for name in ("value", "low", "high", "stderr"):
        assert getattr(together, name) == pytest.approx(getattr(of_problems, name), abs=1e-12)


def test_pooled_share_counts_completions():
    """A problem with more completions has more weight; nothing judged has no share."""
    together = pooled([Tally(1, 1), Tally(9, 0)])
    assert together is not None and together.value == 0.1
    assert pooled([Tally(0, 0)]) is None


# ---- The line about the last steps of a stopped run


@pytest.mark.parametrize(
    ("trained", "saved", "line"),
    [
        (0, NO_CHECKPOINT, "no step was trained yet"),
        (0, 0, "no step was trained yet"),
        (12, 12, "step 12 is saved, no step is lost"),
        (12, 10, "2 trained steps are lost: the last checkpoint has step 10"),
        (3, 2, "1 trained step is lost: the last checkpoint has step 2"),
        (3, NO_CHECKPOINT, "3 trained steps are lost: there is no checkpoint"),
    ],
)
def test_saved_line_counts_lost_steps(trained, saved, line):
    assert saved_line(trained, saved) == line
