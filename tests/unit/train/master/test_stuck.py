"""A batch that can never fill is found out, and one that is only slow is not."""

from __future__ import annotations

from typing import Any

from realsys.train.master.intake_decisions import FEWEST_FAILURES, FEWEST_FILTERED, StuckCheck


def status(reason: str | None = None, **ledger: Any) -> dict[str, Any]:
    counts = {"granted": 10, "running": 0, "finished": 0, "waiting": 0, "trained": 4, "dropped": 0}
    return {"admission": {"reason": reason}, "ledger": {**counts, "dropped_by_reason": {}, **ledger}}


def test_exhausted_data_says_what_became_of_groups() -> None:
    check = StuckCheck(4, 10)
    ended = status("exhausted", finished=3, dropped=3, dropped_by_reason={"failed RewardError": 3})
    assert check.check(ended, ready=3) is None  # its notice may be on the way
    reason = check.check(ended, ready=3)
    assert reason is not None and "3 x failed RewardError" in reason and "fewer than the 4 of a batch" in reason


def test_exhausted_data_after_training_is_an_end() -> None:
    """Also if so many groups were filtered out at the end that a run with further prompts would be stuck."""
    for trained, is_end in ((0, False), (4, True)):
        check = StuckCheck(4, 10)
        assert check.check(status(trained=trained), ready=3) is None
        drops = {"dropped": 999, "dropped_by_reason": {"filtered success_rate": 999}}
        ended = status("exhausted", finished=3, trained=trained, **drops)
        assert check.check(ended, ready=3) is None
        reason = check.check(ended, ready=3)
        assert reason is not None and "999 x filtered success_rate" in reason
        assert check.is_end is is_end and ("add prompts" in reason) is not is_end


def test_exhausted_data_waits_for_outstanding_groups() -> None:
    """Outstanding groups run, wait in the buffer or are in transit."""
    for open_ in ({"running": 1}, {"waiting": 1}, {"finished": 2}):
        check = StuckCheck(4, 10)
        assert [check.check(status("exhausted", **open_), ready=1) for _ in range(3)] == [None] * 3


def test_staleness_and_missing_servers_are_waited_for() -> None:
    check = StuckCheck(4, 10)
    assert [check.check(status(reason), ready=0) for reason in ("staleness", "no_server", None) * 2] == [None] * 6


def test_only_failing_groups_end_the_wait() -> None:
    """Groups that were dropped earlier do not count."""
    check = StuckCheck(4, 10)
    assert check.check(status(dropped=500), ready=0) is None
    assert check.check(status(dropped=500 + FEWEST_FAILURES - 1), ready=0) is None
    failures = {"dropped_by_reason": {"failed RewardError": 532}, "last_failure": "KeyError: 'word' at mine.py:4"}
    reason = check.check(status(dropped=500 + FEWEST_FAILURES, **failures), ready=0)
    assert reason is not None and "532 x failed RewardError; the last one: KeyError: 'word' at mine.py:4" in reason


def filtered(groups: int) -> dict[str, Any]:
    return status(dropped=groups, dropped_by_reason={"filtered success_rate": groups - 1, "filtered equal_rewards": 1})


def test_filtered_groups_are_no_failures() -> None:
    check = StuckCheck(4, 10)
    assert check.check(status(), ready=0) is None
    assert [check.check(filtered(4 * FEWEST_FAILURES - 1), ready=0) for _ in range(2)] == [None] * 2
    assert check.warning() == ""


def test_filter_that_keeps_nothing_warns_then_ends() -> None:
    check = StuckCheck(4, 10)
    assert check.check(filtered(100), ready=0) is None
    assert check.check(filtered(100 + FEWEST_FILTERED // 2), ready=0) is None
    warning = check.warning()
    assert f"the last {FEWEST_FILTERED // 2} groups" in warning and "98% of all groups" in warning
    assert check.warning() == "", "it is said once"
    reason = check.check(filtered(100 + FEWEST_FILTERED), ready=0)
    assert reason is not None and "train.ppo.filter" in reason and "x filtered success_rate" in reason


def test_large_batch_may_filter_more_groups() -> None:
    """A large batch meets more of them by chance."""
    check = StuckCheck(512, 2)
    assert [check.check(filtered(n), ready=0) for n in (1, 1024)] == [None, None]
    assert check.check(filtered(1025), ready=0) is not None
