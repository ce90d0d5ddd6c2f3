"""Use of the GPUs by calls and steps, from the readings of their ranks."""

from __future__ import annotations

import pytest

from realsys.train.master.executor import CallResult, gpu_use, step_gpu_use
from realsys.train.master.step_statistics import train_record

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


def test_mfu_is_over_all_ranks_and_the_slowest_ones_time() -> None:
    found = gpu_use([FIRST, SECOND], seconds=10.0)
    shares = {"mfu": pytest.approx(0.4), "hfu": pytest.approx(0.5)}
    assert found == {**shares, "peak_bytes": 7.0, "utilisation": 0.75, "used_bytes": 9.0}


def test_unread_numbers_are_absent() -> None:
    assert gpu_use([], 1.0) == {}
    assert gpu_use([{"peak_bytes": 5.0}], 1.0) == {"peak_bytes": 5.0}
    assert step_gpu_use({"actor_inf": {}, "actor_train": {}}) == {}


def test_step_has_maxima_and_the_rates_of_each_call() -> None:
    calls = {"actor_inf": {"mfu": 0.3, "peak_bytes": 5.0}, "actor_train": {"mfu": 0.4, "hfu": 0.5, "peak_bytes": 8.0}}
    rates = {"mfu": {"actor_inf": 0.3, "actor_train": 0.4}, "hfu": {"actor_train": 0.5}}
    assert step_gpu_use(calls) == {**rates, "peak_bytes": 8.0}


@pytest.mark.parametrize("gpu", [{}, {"mfu": 0.4}])
def test_step_record_names_gpus_only_where_some_are(gpu: dict[str, float]) -> None:
    result = CallResult({}, {}, 1.0, 0.0, 1.0, 0, gpu=gpu)
    record = train_record({"tokens": 1, "answer_tokens": 1}, {"inf": 0.0, "train": 1.0, "total": 1.0}, {"call": result})
    assert record.get("gpu") == ({"mfu": {"call": 0.4}} if gpu else None)
