"""The lines of the step log: short, whole, and with all that a user needs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.manager.ledger.tickets import ticket_name, ticket_ranges, tickets_in
from realsys.observe.step_log import StepTail
from realsys.train.master.step_statistics import StepLog, short

ids = st.one_of(st.integers(0, 30).map(ticket_name), st.sampled_from(["x", "0000000001x", "eval"]))


@given(st.lists(ids))
def test_tickets_come_back_in_their_order(tickets: list[str]) -> None:
    assert list(tickets_in(ticket_ranges(tickets))) == tickets


def test_tickets_that_follow_one_another_take_no_room() -> None:
    assert ticket_ranges([ticket_name(number) for number in (16, 17, 18, 20, 7)]) == "16-18,20,7"
    assert len(ticket_ranges([ticket_name(number) for number in range(512)])) == 5
    assert list(tickets_in("")) == []


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_keep_what_single_precision_has(value: float) -> None:
    (found,) = short({"value": value}).values()
    assert found == pytest.approx(value, rel=0.6e-6, abs=0.6e-323)


def test_times_keep_milliseconds_and_integers_stay() -> None:
    record = {"time": 1795286285.7614832, "step": 123456789, "stats": {"loss": 0.123456789, "none": None, "zero": 0.0}}
    assert short(record) == {
        "time": 1795286285.761,
        "step": 123456789,
        "stats": {"loss": 0.1234568, "none": None, "zero": 0.0},
    }
    assert math.isnan(short({"value": math.nan})["value"]) and record["time"] == 1795286285.7614832


def test_torn_line_of_predecessor_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for content in ("", '{"kind":"phase"}\n', '{"kind":"phase"}\n{"kind":"tr'):
        path.write_text(content)
        log = StepLog(path)
        log.append({"kind": "train", "step": 1, "tickets": ["0000000004", "0000000005"]})
        log.close()
        tail = StepTail(path)
        assert tail.read()[-1] == {"kind": "train", "step": 1, "tickets": "4-5"}
        assert tail.skipped == (content[-1:] not in ("", "\n"))


def test_log_is_followed_record_by_record(tmp_path: Path) -> None:
    """Records that the reader did not take come next."""
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps({"kind": "train", "step": step}) + "\n" for step in range(5)))
    tail = StepTail(path)
    for record in tail.records():
        if record["step"] == 2:
            break
    assert [record["step"] for record in tail.records()] == [3, 4]
