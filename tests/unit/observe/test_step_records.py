"""Records of the step log: the newest ones, their fields, points and rates, and the warning of a weak signal."""

import ast
import functools
import operator
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from realsys.config.schema import Config
from realsys.observe import signal, step_log
from realsys.observe.percent import apportioned, percent, whole_percents
from realsys.observe.rate import RateWindow
from realsys.observe.signal import STEPS, DriftWatch, SignalWatch, signal_warning
from realsys.observe.step_fields import (
    FIELDS,
    GROUPS,
    curve_metrics,
    field_of,
    metric_name,
    metrics_of,
    names,
    numbers,
    rewrite,
    step_of,
)
from realsys.observe.step_log import LatestRecords, StepTail, read_steps
from realsys.observe.timeline import why
from tests.support.run_logs import append, evaluation, recovered, train, undocumented, warmup


def test_newest_of_each_curve_is_returned(tmp_path):
    path = tmp_path / "steps.jsonl"
    records = LatestRecords(path)
    assert records.read() == []
    append(path, warmup(1), warmup(2), evaluation(0), evaluation(0, set="aime"), train(1))
    assert records.read() == [warmup(2), evaluation(0), evaluation(0, set="aime"), train(1)]
    append(path, train(2), evaluation(2))
    assert {record["step"] for record in records.read()} == {2, 0}


def test_undone_records_are_gone(tmp_path):
    path = tmp_path / "steps.jsonl"
    append(path, warmup(2), evaluation(0), train(1), train(2), recovered(1))
    assert LatestRecords(path).read() == [warmup(2), evaluation(0)]


def test_long_log_is_read_from_near_its_end(tmp_path, monkeypatch):
    path = tmp_path / "steps.jsonl"
    append(path, evaluation(0), *(train(step) for step in range(1, 100)))
    monkeypatch.setattr(step_log, "MAX_BYTES", 250)
    assert LatestRecords(path).read() == [train(99)]


def test_read_beside_another_does_not_wait(tmp_path):
    path = tmp_path / "steps.jsonl"
    append(path, train(1))
    records = LatestRecords(path)
    with records._lock:
        assert records.read() == []


def test_gauges_have_labels_unit_and_meaning():
    class Collector:
        def collect(self):
            record = train(4, untrained={"stale": 0.25, "failed": 0.5}, stats={"my/own": 3.0, "w_ess": 0.75})
            return curve_metrics([record, evaluation(4), evaluation(2, set="aime", pass_at={"8": {"value": 0.5}})])

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())  # type: ignore[arg-type]
    families = {f.name: f for f in text_string_to_metric_families(generate_latest(registry).decode())}
    found = {(s.name, *s.labels.values()): s.value for f in families.values() for s in f.samples}
    assert found["realsys_train_untrained", "stale"] == 0.25 and found["realsys_train_untrained", "failed"] == 0.5
    assert found["realsys_train_stats_w_ess",] == 0.75 and found["realsys_train_stats", "my/own"] == 3.0
    assert found["realsys_eval_accuracy", "eval"] == 0.04 and found["realsys_eval_accuracy", "aime"] == 0.02
    assert 0.5 in [s.value for s in families["realsys_eval_pass_at_value"].samples]
    assert families["realsys_train_untrained"].documentation.endswith("by reason (share)")


# ---- Percentages are rounded as on the status page


@pytest.mark.parametrize(
    ("share", "digits", "text"),
    [
        (0.8125, 1, "81.3%"),  # (100 * 0.8125).toFixed(1) in a browser
        (0.1875, 1, "18.8%"),
        (0.125, 0, "13%"),
        (-0.0625, 1, "-6.3%"),
        (0.41, 1, "41.0%"),
        (1.0, 0, "100%"),
    ],
)
def test_half_a_unit_is_rounded_up(share, digits, text):
    assert percent(share, digits) == text


def test_percentages_add_up_to_hundred():
    assert apportioned({"a": 1.0, "b": 1.0, "c": 1.0}, 100) == {"a": 34, "b": 33, "c": 33}
    assert apportioned({"a": 0.004, "b": 0.996}, 100) == {"a": 0, "b": 100}
    assert apportioned({"a": 0.0}, 100) == {}


def test_percentages_of_parts_add_up_to_theirs():
    assert whole_percents({"a": 1.0, "b": 1.0, "c": 0.0}, 3.0) == {"a": 34, "b": 33, "c": 0}
    assert whole_percents({"a": 0.0}, 0.0) == {"a": 0}


# ---- Points of curves: names, and numbers that must not be shown


def test_metrics_have_their_kind_in_front():
    record = train(3, staleness={"mean": 1.5, "histogram": {"1": 4}}, total=9)
    assert metrics_of(record) == {"train/reward_mean": 30.0, "train/staleness/mean": 1.5}


def test_metrics_of_an_evaluation_name_its_set():
    metrics = metrics_of(evaluation(7, set="aime"))
    assert metrics == {"eval/aime/complete": 1.0, "eval/aime/accuracy": 0.07}


def test_incomplete_evaluation_shows_no_accuracy():
    record = evaluation(7, complete=False, accuracy=1.0, length_mean=25.0, failed=2)
    assert metrics_of(record) == {"eval/eval/complete": 0.0, "eval/eval/failed": 2.0}


def test_metric_of_the_user_is_delivered():
    assert metrics_of({"kind": "train", "step": 1, "metrics": {"my/own": 2}}) == {"train/metrics/my/own": 2.0}


def test_evaluation_is_placed_at_its_weights():
    assert step_of(evaluation(4, version=6)) == 6
    assert step_of(train(4)) == 4 and step_of({"kind": "train"}) is None


# ---- Rates


def test_rate_window_expires_and_starts_low():
    window = RateWindow(window_s=10)
    assert window.rate(0.0) == 0.0
    window.add(50, 100.0)
    assert window.rate(100.1) == 50.0, "a burst in the first instant is not a million per second"
    window.add(50, 104.0)
    assert window.rate(105.0) == 20.0
    assert window.rate(200.0) == 0.0 and window.total == 100


# ---- Reader of the step log while it is written


def test_tail_returns_each_whole_record_once(tmp_path):
    path = tmp_path / "steps.jsonl"
    tail = StepTail(path)
    assert tail.read() == []
    with path.open("ab", buffering=0) as file:
        file.write(b'{"kind":"phase"}\n{"kind":"tr')
        assert tail.read() == [{"kind": "phase"}]
        file.write(b'ain"}\n')
        assert tail.read() == [{"kind": "train"}]
        file.write(b'{"torn\n[]\n{"no":"kind"}\n{"kind":"eval"}\n')
        assert tail.read() == [{"kind": "eval"}]
    assert tail.skipped == 3 and tail.read() == []
    assert len(read_steps(path)) == 3


# ---- The table of fields: every name has one entry, ``/metrics`` can name it, and the page shows it


PAGE = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text("utf-8")
ALL = [(kind, field) for kind, fields in FIELDS.items() for field in fields.values()]


def test_page_has_the_fields_of_the_table():
    assert rewrite(PAGE) == PAGE, "run `make docs`"


def test_every_field_has_meaning_and_group():
    assert [field.name for _, field in ALL if not field.meaning or field.group not in GROUPS] == []


def test_names_in_metrics_differ_and_are_valid():
    """A name of Prometheus has one set of labels."""
    labels: dict[str, set[tuple[str, ...]]] = {}
    for kind, field in ALL:
        labels.setdefault(metric_name(kind, field), set()).add(tuple(re.findall(r"{(\w+)}", field.name)))
    texts = {name for name in labels if not re.fullmatch(r"[a-z_][a-z0-9_]*", name)}
    assert texts == set() and [name for name, found in labels.items() if len(found) > 1] == []


@pytest.mark.parametrize(
    ("name", "entry", "labels"),
    [
        ("reward_mean", "reward_mean", {}),
        ("untrained/stale", "untrained/{reason}", {"reason": "stale"}),
        ("metrics/gateway/calls", "metrics/{name}", {"name": "gateway/calls"}),
        ("stats/w_ess", "stats/w_ess", {}),
        ("stats/my_call/loss", "stats/{name}", {"name": "my_call/loss"}),
    ],
)
def test_name_finds_entry_and_labels(name, entry, labels):
    found = field_of("train", name)
    assert found is not None and (found.field.name, found.labels) == (entry, labels)


def test_unknown_name_has_no_entry():
    assert field_of("train", "no_such_field") is None and field_of("no_such_kind", "step") is None
    assert undocumented([{"kind": "train", "stats": {"x": 1}, "y": 2}]) == {"train: stats/x", "train: y"}


def test_numbers_leave_out_texts_lists_and_null():
    record = {"a": 1, "b": None, "c": "text", "d": [1, 2], "e": {"f": True, "g": {"h": 0.5}}, "i": 10**400}
    assert dict(numbers(record)) == {"a": 1.0, "e/f": 1.0, "e/g/h": 0.5}
    assert set(names(record)) == {"a", "b", "c", "d", "e/f", "e/g/h", "i"}


# ---- The warning that the groups of a run carry no signal


def steps(equal, *, wrong=0.0, right=0.0, cut=0.0, count=STEPS):
    signal = {"equal": equal, "wrong": wrong, "right": right, "batch_equal": float(equal == 1.0)}
    return [{"signal": signal, "truncated_fraction": cut}] * count


@pytest.mark.parametrize(
    ("records", "cause"),
    [
        (steps(0.75, wrong=0.75, cut=0.77), "raise generation.sampling.max_new_tokens"),
        (steps(0.75, wrong=0.75), "the prompts are too hard"),
        (steps(0.9, right=0.9), "the prompts are too easy"),
        (steps(0.9), "check the verifier"),
    ],
)
def test_likely_cause_is_named(records, cause):
    assert cause in signal_warning(records, "group")


def test_warning_has_the_numbers():
    warning = signal_warning(steps(0.75, wrong=0.72, cut=0.77), "group", before=0.039)
    assert "75% of the groups of the last 3 steps carry no signal (72% all wrong, 0% all right, " in warning
    assert "77% of the completions cut off, accuracy before training 3.9%)" in warning


@pytest.mark.parametrize(
    ("records", "mean", "warns"),
    [
        (steps(0.5, wrong=0.5), "group", False),
        (steps(1.0, wrong=1.0, count=STEPS - 1), "group", False),
        (steps(0.9, wrong=0.9), "batch", False),  # equal groups teach against the mean of the batch
        (steps(1.0, wrong=1.0), "batch", True),
        (steps(1.0, wrong=1.0), "none", False),
        ([{}] * STEPS, "group", False),  # of an older build
    ],
)
def test_warning_depends_on_signal_steps_and_mean(records, mean, warns):
    assert bool(signal_warning(records, mean)) == warns


def test_watch_warns_once():
    watch = SignalWatch("group")
    warned = [bool(watch.observe(record)) for record in steps(0.9, wrong=0.9, count=5)]
    assert warned == [False, False, True, False, False]


@pytest.mark.parametrize("module", [signal, why])
def test_remedies_name_existing_settings(module):
    settings = Config(trial="t").model_dump()
    source = Path(str(module.__file__)).read_text("utf-8")
    literals = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    for text in [text for text in literals if isinstance(text, str)]:
        for name in re.findall(rf"\b(?:{'|'.join(settings)})(?:\.[a-z_]+)+", text):
            functools.reduce(operator.getitem, name.split("."), settings)


CALM = {"entropy_mean": 0.4, "grad_norm": 0.3, "kl_prox_theta_mean": 0.001, "w_ess": 0.97}


def warnings_of(*changes, **fields):
    """Return the warnings of steps after eight calm ones."""
    watch = DriftWatch()
    stats = [CALM] * 8 + [CALM | change for change in changes]
    records = ({"step": step, "stats": each, **fields} for step, each in enumerate(stats, 1))
    return [warning for record in records for warning in watch.observe(record)]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"entropy_mean": 0.03}, "step 9: entropy fell to 0.03 from 0.4 nats in the first 5 steps; completions"),
        ({"grad_norm": 4.0}, "step 9: grad_norm jumped to 4, from 0.3 (median of the last 8 steps): lower"),
        ({"kl_prox_theta_mean": 0.02}, "step 9: kl_prox_theta_mean jumped to 0.02, from 0.001"),
        ({"w_ess": 0.3}, "step 9: behaviour weights leave 30% of the tokens effective (w_ess)"),
    ],
)
def test_policy_that_drifts_is_warned_of_once(change, problem):
    [warning] = warnings_of(change, change, reward_mean=0.5)
    assert warning.startswith(problem)
    # Demonstrations have no reward, and certainty is what they teach.
    assert len(warnings_of(change)) == ("entropy_mean" not in change)


@pytest.mark.parametrize(
    "change",
    [
        {"entropy_mean": 0.1, "grad_norm": 2.0, "kl_prox_theta_mean": 0.005, "w_ess": 0.6},
        {"grad_norm": 0.9, "kl_prox_theta_mean": 0.009},  # small numbers may jump
        dict.fromkeys(CALM),  # a step without computed tokens
        {"entropy_mean": float("nan"), "grad_norm": float("nan")},
    ],
)
def test_policy_that_learns_is_not_warned_of(change):
    assert warnings_of(change, reward_mean=0.5) == []


def test_first_steps_have_nothing_to_compare_with():
    watch = DriftWatch()
    wild = [{"grad_norm": 10.0**step, "entropy_mean": 0.1**step} for step in range(5)]
    assert [watch.observe({"stats": stats, "reward_mean": 0.5}) for stats in wild] == [[]] * 5
