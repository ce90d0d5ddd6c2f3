"""The monitor of log-prob agreement: thresholds, trend, steps without tokens, what it says and when."""

import logging
import math

import pytest

from realsys.algorithm.minibatches import sequence_refs
from realsys.model_calls import SnapshotPlan
from realsys.train.master.step_statistics import AgreementMonitor, AgreementSampler
from realsys.types import CONSTRAINED, SampleMeta


def stats(mean, tokens=100.0):
    return {
        "agreement/tokens": tokens,
        "agreement/difference_mean": mean,
        "agreement/difference_max": 2 * mean,
        "agreement/ratio": math.exp(mean),
        "logprob_difference_mean": 9.0,  # over all tokens: not this monitor's
    }


def warnings(monitor, means):
    return [bool(monitor.observe(v, stats(mean))["warning"]) for v, mean in enumerate(means)]


def test_a_step_is_shown_as_it_was():
    assert AgreementMonitor(0.05, window=3).observe(7, stats(1e-6)) == {
        "version": 7,
        "tokens": 100,
        "difference_mean": 1e-6,
        "difference_max": 2e-6,
        "ratio": pytest.approx(1.000001),
        "warning": "",
    }


@pytest.mark.parametrize("found", [{}, {"agreement/tokens": 0.0}])
def test_agreement_without_tokens_is_reported_as_missing(found):
    """It is not reported as an agreement of zero."""
    shown = AgreementMonitor(0.05, window=3).observe(7, found)
    assert (shown["tokens"], shown["difference_mean"], shown["ratio"], shown["warning"]) == (0, None, None, "")


def test_difference_over_threshold_warns_and_logs_once(caplog):
    monitor = AgreementMonitor(0.05, window=3)
    with caplog.at_level(logging.WARNING):
        assert warnings(monitor, [0.05, 0.051, 0.2, 0.01]) == [False, True, True, False]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "log-probs of engine and trainer disagree at version 1",
        "log-probs of engine and trainer agree again at version 3",
    ]


def test_not_a_number_warns():
    assert warnings(AgreementMonitor(0.05, window=3), [math.nan]) == [True]


def test_slow_growth_below_threshold_warns_by_trend():
    # the first three average 0.002; the last three reach 4 times that with (0.004 + 0.008 + 0.0121) / 3 = 0.00803
    means = [0.001, 0.002, 0.003, 0.002, 0.004, 0.008, 0.0121]
    assert warnings(AgreementMonitor(0.05, window=3), means) == [False] * 6 + [True]


def test_trend_within_numerical_noise_is_none():
    assert not any(warnings(AgreementMonitor(0.05, window=3), [1e-8] * 3 + [3e-4] * 10)), (
        "under 4 times the floor of 1e-4"
    )
    assert any(warnings(AgreementMonitor(0.05, window=3), [1e-8] * 3 + [5e-4] * 10))


def test_steps_weigh_by_their_tokens_in_the_trend():
    monitor = AgreementMonitor(0.05, window=3)
    for version in range(3):
        monitor.observe(version, stats(0.001))
    for version in range(3, 5):
        monitor.observe(version, stats(0.001, tokens=1000.0))
    assert monitor.observe(5, stats(0.04, tokens=10.0))["warning"] == "", "ten tokens are no trend"


def sample(number, oldest, newest, tokens=100):
    return SampleMeta(
        sample_id=f"s{number}",
        ticket_id=f"t{number}",
        attempt=1,
        truncated=False,
        owner=0,
        length=tokens + 5,
        loss_tokens=tokens,
        reward=0.0,
        version_min=oldest,
        version_max=newest,
    )


def test_kept_weights_wait_for_their_tokens():
    """A trainer that is always three versions behind: the batch at version v has tokens of v - 3."""
    sampler = AgreementSampler(3, 150)
    plans = [sampler.plan(v, [sample(n, v - 3, v - 3) for n in range(4)]) for v in range(3, 10)]
    scored = SnapshotPlan(version=3, samples=["s0", "s1"], take=True)
    assert plans[:4] == [SnapshotPlan(take=True), None, None, scored]
    assert plans[6] == SnapshotPlan(version=6, samples=["s0", "s1"], take=True)


def test_current_tokens_need_no_kept_weights():
    sampler = AgreementSampler(3, 150)
    assert [sampler.plan(v, [sample(0, v - 1, v)]) for v in range(4)] == [None] * 4


def test_tokens_under_a_grammar_are_not_compared() -> None:
    """Their log-probs are those of the tokens that the grammar left."""
    sampler = AgreementSampler(3, 150, scores_all=False)
    own = [sample(0, 5, 5), sample(1, 5, 5)]
    own[0].metrics = {CONSTRAINED: 1.0}
    assert sampler.plan(5, own) == SnapshotPlan(5, ["s1"])
    assert sequence_refs([own])[0].constrained and not sequence_refs([own])[1].constrained


def test_kept_weights_expire() -> None:
    """No server ever sampled with version 0: another one is kept after 2 * (eta + 1) steps."""
    sampler = AgreementSampler(1, 150)
    plans = [sampler.plan(v, [sample(0, -1, -1)]) for v in range(7)]
    assert [v for v, plan in enumerate(plans) if plan is not None and plan.take] == [0, 5]


def test_no_sample_tokens_keep_no_weights():
    assert AgreementSampler(3, 0).plan(5, [sample(0, 1, 2)]) is None


def test_step_without_inference_scores_its_own_version():
    """Without `actor_inf` nothing else computes log-probs of the version that is trained."""
    sampler = AgreementSampler(3, 150, scores_all=False)
    assert sampler.plan(5, [sample(0, 5, 5), sample(1, 3, 5), sample(2, 4, 4)]) == SnapshotPlan(5, ["s0", "s1"])
    assert sampler.plan(6, [sample(3, 5, 5)]) == SnapshotPlan(take=True)
