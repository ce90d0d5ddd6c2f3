"""Limits of a run, and why it failed."""

import pytest

from realsys.reward.sandbox.settings import CPU, CRASHED, RunEnded, RunLimits


def test_limit_of_zero_is_refused():
    with pytest.raises(ValueError, match="wall_s is 0"):
        RunLimits(wall_s=0)


def test_reached_limit_precedes_exit_code():
    assert RunEnded(-9, CPU).reason == CPU
    assert RunEnded(1).reason == CRASHED
    assert RunEnded(0).reason == ""


def test_process_limit_counts_all_calls():
    assert RunLimits(cpu_s=2.0).as_message(calls=3)["process_cpu_s"] == 6.0
