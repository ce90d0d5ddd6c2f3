"""The monitor of log-prob agreement: thresholds, trend, steps without tokens, what it says and when."""

from __future__ import annotations

import logging
import math

import pytest

from realsys.config.schema import AgreementConfig
from realsys.master.records.agreement import AgreementMonitor

CONFIG = AgreementConfig(max_difference=0.05, max_growth=4.0, window=3, floor=1e-4)


def stats(mean: float, tokens: float = 100.0) -> dict[str, float]:
    return {
        "agreement/tokens": tokens,
        "agreement/difference_mean": mean,
        "agreement/difference_max": 2 * mean,
        "agreement/ratio": math.exp(mean),
        "logprob_difference_mean": 9.0,  # over all tokens: not this monitor's
    }


def warnings(monitor: AgreementMonitor, means: list[float]) -> list[bool]:
    return [bool(monitor.observe(v, stats(mean))["warning"]) for v, mean in enumerate(means)]


def test_a_step_is_shown_as_it_was() -> None:
    assert AgreementMonitor(CONFIG).observe(7, stats(1e-6)) == {
        "version": 7,
        "tokens": 100,
        "difference_mean": 1e-6,
        "difference_max": 2e-6,
        "ratio": pytest.approx(1.000001),
        "warning": "",
    }


@pytest.mark.parametrize("found", [{}, {"agreement/tokens": 0.0}])
def test_agreement_without_tokens_is_reported_as_missing(found: dict[str, float]) -> None:
    """It is not reported as an agreement of zero."""
    shown = AgreementMonitor(CONFIG).observe(7, found)
    assert (shown["tokens"], shown["difference_mean"], shown["ratio"], shown["warning"]) == (0, None, None, "")


def test_difference_over_threshold_warns_and_logs_once(caplog: pytest.LogCaptureFixture) -> None:
    monitor = AgreementMonitor(CONFIG)
    with caplog.at_level(logging.WARNING):
        assert warnings(monitor, [0.05, 0.051, 0.2, 0.01]) == [False, True, True, False]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "log-probs of engine and trainer disagree at version 1",
        "log-probs of engine and trainer agree again at version 3",
    ]


def test_not_a_number_warns() -> None:
    assert warnings(AgreementMonitor(CONFIG), [math.nan]) == [True]


def test_slow_growth_below_threshold_warns_by_trend() -> None:
    # the first three average 0.002; the last three reach 4 times that with (0.004 + 0.008 + 0.0121) / 3 = 0.00803
    means = [0.001, 0.002, 0.003, 0.002, 0.004, 0.008, 0.0121]
    assert warnings(AgreementMonitor(CONFIG), means) == [False] * 6 + [True]


def test_trend_within_numerical_noise_is_none() -> None:
    assert not any(warnings(AgreementMonitor(CONFIG), [1e-8] * 3 + [3e-4] * 10)), "under 4 times the floor of 1e-4"
    assert any(warnings(AgreementMonitor(CONFIG), [1e-8] * 3 + [5e-4] * 10))


def test_steps_weigh_by_their_tokens_in_the_trend() -> None:
    monitor = AgreementMonitor(CONFIG)
    for version in range(3):
        monitor.observe(version, stats(0.001))
    for version in range(3, 5):
        monitor.observe(version, stats(0.001, tokens=1000.0))
    assert monitor.observe(5, stats(0.04, tokens=10.0))["warning"] == "", "ten tokens are no trend"
