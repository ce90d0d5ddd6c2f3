"""The lines of the step log: short, whole, and with all that a user needs."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.manager.ledger.tickets import ticket_name, ticket_ranges, tickets_in
from realsys.observe.step_log import StepTail
from realsys.train.master.executor import CallResult, gpu_use, step_gpu_use
from realsys.train.master.step_statistics import StepLog, short, train_record

ids = st.one_of(st.integers(0, 30).map(ticket_name), st.sampled_from(["x", "0000000001x", "eval"]))


@given(st.lists(ids))
def test_tickets_come_back_in_their_order(tickets):
    assert list(tickets_in(ticket_ranges(tickets))) == tickets


def test_tickets_that_follow_one_another_take_no_room():
    assert ticket_ranges([ticket_name(number) for number in (16, 17, 18, 20, 7)]) == "16-18,20,7"
    assert len(ticket_ranges([ticket_name(number) for number in range(512)])) == 5
    assert list(tickets_in("")) == []


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_keep_what_single_precision_has(value):
    (found,) = short({"value": value}).values()
    assert found == pytest.approx(value, rel=0.6e-6, abs=0.6e-323)


def test_times_keep_milliseconds_and_integers_stay():
    record = {"time": 1795286285.7614832, "step": 123456789, "stats": {"loss": 0.123456789, "none": None, "zero": 0.0}}
    assert short(record) == {
        "time": 1795286285.761,
        "step": 123456789,
        "stats": {"loss": 0.1234568, "none": None, "zero": 0.0},
    }
    assert math.isnan(short({"value": math.nan})["value"]) and record["time"] == 1795286285.7614832


def test_torn_line_of_predecessor_is_closed(tmp_path):
    path = tmp_path / "steps.jsonl"
    for content in ("", '{"kind":"phase"}\n', '{"kind":"phase"}\n{"kind":"tr'):
        path.write_text(content)
        log = StepLog(path)
        log.append({"kind": "train", "step": 1, "tickets": ["0000000004", "0000000005"]})
        log.close()
        tail = StepTail(path)
        assert tail.read()[-1] == {"kind": "train", "step": 1, "tickets": "4-5"}
        assert tail.skipped == (content[-1:] not in ("", "\n"))


def test_log_is_followed_record_by_record(tmp_path):
    """Records that the reader did not take come next."""
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps({"kind": "train", "step": step}) + "\n" for step in range(5)))
    tail = StepTail(path)
    for record in tail.records():
        if record["step"] == 2:
            break
    assert [record["step"] for record in tail.records()] == [3, 4]


# ---- Use of the GPUs by calls and steps, from the readings of their ranks


FIRST = {
    "flops": 6e12,
    "computed_flops": 8e12,
    "peak_flops": 1e12,
    "peak_bytes": 5.0,
    "utilisation": 0.5,
    "used_bytes": 9.0,
}
SECOND = {
    "flops": 2e12,
    "computed_flops": 2e12,
    "peak_flops": 1e12,
    "peak_bytes": 7.0,
    "utilisation": 1.0,
    "used_bytes": 8.0,
}


def test_mfu_is_over_all_ranks_and_the_slowest_ones_time():
    found = gpu_use([FIRST, SECOND], seconds=10.0)
    shares = {"mfu": pytest.approx(0.4), "hfu": pytest.approx(0.5)}
    assert found == {**shares, "peak_bytes": 7.0, "utilisation": 0.75, "used_bytes": 9.0}


def test_unread_numbers_are_absent():
    assert gpu_use([], 1.0) == {}
    assert gpu_use([{"peak_bytes": 5.0}], 1.0) == {"peak_bytes": 5.0}
    assert step_gpu_use({"actor_inf": {}, "actor_train": {}}) == {}


def test_step_has_maxima_and_the_rates_of_each_call():
    calls = {"actor_inf": {"mfu": 0.3, "peak_bytes": 5.0}, "actor_train": {"mfu": 0.4, "hfu": 0.5, "peak_bytes": 8.0}}
    rates = {"mfu": {"actor_inf": 0.3, "actor_train": 0.4}, "hfu": {"actor_train": 0.5}}
    assert step_gpu_use(calls) == {**rates, "peak_bytes": 8.0}


@pytest.mark.parametrize("gpu", [{}, {"mfu": 0.4}])
def test_step_record_names_gpus_only_where_some_are(gpu):
    result = CallResult({}, {}, 1.0, 0.0, 1.0, 0, gpu=gpu)
    record = train_record({"tokens": 1, "answer_tokens": 1}, {"inf": 0.0, "train": 1.0, "total": 1.0}, {"call": result})
    assert record.get("gpu") == ({"mfu": {"call": 0.4}} if gpu else None)
