"""Limits of a run, and why it failed."""

import pytest

from realsys.sandbox.limits import CPU, CRASHED, Ended, Limits


def test_limit_of_zero_is_refused():
    with pytest.raises(ValueError, match="wall_s is 0"):
        Limits(wall_s=0)


def test_reached_limit_precedes_exit_code():
    assert Ended(-9, CPU).reason == CPU
    assert Ended(1).reason == CRASHED
    assert Ended(0).reason == ""


def test_process_limit_counts_all_calls():
    assert Limits(cpu_s=2.0).as_message(calls=3)["process_cpu_s"] == 6.0
