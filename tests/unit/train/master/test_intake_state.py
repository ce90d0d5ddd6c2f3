"""Decisions about groups that arrive, without a manager and without a clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.algorithm.sequence_buffer import StalePolicy
from realsys.errors import StuckError, WaitTimeout
from realsys.train.master.intake_decisions import IntakeSettings, IntakeState
from realsys.types import SampleMeta

SETTINGS = IntakeSettings(batch_groups=2, eta=1, stale_policy="drop", max_reissues=2, max_refills=10, timeout_s=10.0)
STATUS: dict[str, Any] = {
    "admission": {"reason": "staleness"},
    "ledger": dict.fromkeys(("granted", "running", "finished", "waiting", "trained", "dropped"), 0)
    | {"dropped_by_reason": {}},
}


def group(number: int, version: int = 0, reissues: int = 0) -> list[SampleMeta]:
    ticket = f"{number:010d}"
    meta = SampleMeta(f"{ticket}.{reissues}/0.0", ticket, reissues, 8, 3, 1.0, False, version, version, 0)
    meta.reissues = reissues
    return [meta]


def mixed(number: int, *versions: int) -> list[SampleMeta]:
    """A group with one token of each version."""
    [meta] = group(number)
    meta.loss_tokens = len(versions)
    meta.version_min, meta.version_max = min(versions), max(versions)
    meta.version_tokens = [(version, 1) for version in versions]
    return [meta]


def intake(settings: IntakeSettings = SETTINGS) -> IntakeState:
    return IntakeState(settings, "")


def test_batch_is_proposed_claimed_and_concluded() -> None:
    state = intake()
    state.add(group(1))
    assert state.propose(0) == []
    state.add(group(0))
    assert state.propose(0) == ["0000000000", "0000000001"]
    batch = state.conclude(())
    assert batch is not None and batch.tickets == ["0000000000", "0000000001"]
    assert (state.held(), state.version) == ([], 1)


def test_ended_tickets_leave_and_others_stay_ready() -> None:
    state = intake()
    state.add(group(0) + group(1))
    state.propose(0)
    assert state.conclude(["0000000000"]) is None
    assert state.held() == [("0000000001", 0)]
    assert [sample.ticket_id for sample in state.depart().free] == ["0000000000"]


def test_dropped_group_is_held_until_reported() -> None:
    state = intake()
    state.propose(5)
    state.add(group(0, reissues=2))  # it is too old to be trained, and was issued again often enough
    departures = state.depart()
    assert departures.dropped == [("0000000000", "masked")] and len(departures.free) == 1
    assert state.held() == [("0000000000", 2)], "the manager must not reissue it as lost"
    state.reported(departures)
    assert state.held() == [] and not state.departures


def test_wait_ends_at_its_deadline() -> None:
    state = intake()
    state.propose(0)
    state.begin_wait(100.0)
    state.check_wait(STATUS, 109.9)
    with pytest.raises(WaitTimeout, match="waited 10 s for a group and has 0 of 2"):
        state.check_wait(STATUS, 110.0)


def filtered(groups: int) -> dict[str, Any]:
    drops = {"dropped": groups, "dropped_by_reason": {"filtered equal_rewards": groups}}
    return STATUS | {"ledger": STATUS["ledger"] | drops}


def test_filter_that_keeps_nothing_warns_then_ends(caplog: pytest.LogCaptureFixture) -> None:
    state = intake()
    state.propose(0)
    state.begin_wait(100.0)
    for groups in (0, 128, 255):
        state.check_wait(filtered(groups), 101.0)
    assert [record.getMessage()[:31] for record in caplog.records] == ["step 1 waits for its batch: the"]
    with pytest.raises(StuckError, match="can never get its batch: the last 256 groups were all filtered out, 100%"):
        state.check_wait(filtered(256), 101.0)


# ---- staleness


def test_group_too_old_on_arrival_is_issued_again() -> None:
    """At once, not after waiting for its turn."""
    state = intake()
    state.propose(2)
    state.add(group(0, version=0))
    departures = state.depart()
    assert (departures.stale, departures.dropped, len(departures.free)) == ([("0000000000", 0)], [], 1)
    assert state.held() == [("0000000000", 0)]
    state.reported(departures)
    assert state.held() == []


def test_group_too_old_at_its_turn_is_reissued() -> None:
    state = intake()
    state.propose(1)
    for number in range(2):
        state.add(group(number, version=1))
    state.add(group(2, version=0))  # its batch is the second one: trained on top of version 2
    assert state.depart().stale == [("0000000002", 0)]


def test_one_token_that_is_too_old_reissues_its_group() -> None:
    state = intake()
    state.propose(4)
    state.add(mixed(0, 0, 5))
    assert state.depart().stale == [("0000000000", 0)]


def test_prompt_is_issued_at_most_three_times() -> None:
    """After two reissues its old tokens are masked instead, and nothing is left to train."""
    state = intake()
    state.propose(5)
    for reissues in range(3):
        state.add(group(0, version=0, reissues=reissues))
        departures = state.depart()
        assert [attempt for _, attempt in departures.stale] == ([reissues] if reissues < 2 else [])
    assert departures.dropped == [("0000000000", "masked")]


def test_group_without_young_tokens_leaves_on_arrival() -> None:
    """Under `mask`, too, it does not wait for its turn."""
    state = intake(replace(SETTINGS, stale_policy="mask"))
    state.propose(5)
    state.add(group(0, version=0))
    state.add(mixed(1, 0, 5))
    assert state.depart().dropped == [("0000000000", "masked")]
    assert state.held() == [("0000000000", 0), ("0000000001", 0)]


def test_newest_too_old_group_of_each_worker_is_kept() -> None:
    """A worker writes at most one per second, so the request names one."""
    state = intake(replace(SETTINGS, stale_policy="mask"))
    state.propose(5)
    for number in range(4):
        [sample] = group(number, version=0)
        sample.owner = number % 2
        state.add([sample])
    kept = state.depart().kept
    assert {worker: request.samples[0].ticket_id for worker, request in kept.items()} == {
        0: "0000000002",
        1: "0000000003",
    }
    assert [(request.reason, request.next_version) for request in kept.values()] == [("masked", 5)] * 2
    assert not state.depart()


def test_group_masked_by_its_turn_is_kept() -> None:
    state = intake(replace(SETTINGS, stale_policy="mask"))
    state.add(group(0, version=0))
    state.propose(5)
    assert state.depart().kept[0].next_version == 5
    state.add(group(1) + group(1))  # the second one is a copy
    assert state.depart().kept.keys() == {0}


@pytest.mark.parametrize("policy", ["mask", "drop"])
def test_tokens_beyond_bound_are_masked_in_batch(policy: StalePolicy) -> None:
    state = intake(replace(SETTINGS, stale_policy=policy, max_reissues=0))
    state.add(mixed(0, 1, 3) + mixed(1, 3, 4) + mixed(2, 0, 1))
    assert state.propose(4) == ["0000000000", "0000000001"], "the third has nothing left, but its turn has not come"
    batch = state.conclude(())
    assert batch is not None and [sample.loss_tokens for sample in batch.samples] == [1, 2]
    assert [sample.ticket_id for sample in batch.masked] == ["0000000000"] and batch.oldest_trained == 3
    assert batch.oldest == [3, 3] and batch.losses.untrained == {"masked": 0.25}


def test_policy_train_wastes_nothing() -> None:
    state = intake(replace(SETTINGS, stale_policy="train"))
    state.add(group(0, version=0) + group(1, version=9))
    state.propose(9)
    batch = state.conclude(())
    assert batch is not None and batch.oldest == [0, 9]
    assert (batch.losses.untrained, batch.losses.length_ks, batch.masked) == ({}, 0.0, [])


arrivals = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 2), st.lists(st.integers(0, 6), min_size=1, max_size=4)), max_size=30
)


@given(arrivals, st.sampled_from(["mask", "drop"]), st.integers(0, 2))
def test_nothing_older_than_eta_is_in_any_batch(
    arrived: list[tuple[int, int, list[int]]], policy: StalePolicy, eta: int
) -> None:
    state = intake(replace(SETTINGS, stale_policy=policy, eta=eta))
    version = 0
    for number, reissues, versions in arrived:
        [meta] = mixed(number, *sorted(versions))
        meta.attempt = meta.reissues = reissues
        meta.sample_id = f"{meta.ticket_id}.{reissues}/0.0"
        state.add([meta])
        assert all(attempt < SETTINGS.max_reissues for _, attempt in state.depart().stale)
        if not state.propose(version):
            continue
        batch = state.conclude(())
        assert batch is not None and len(batch.tickets) == SETTINGS.batch_groups
        for sample in batch.samples:
            assert sample.version_min >= version - eta and sample.loss_tokens > 0
            assert all(token >= version - eta for token, _ in sample.version_tokens)
        version += 1


def test_tokens_that_workers_did_not_push_are_lost() -> None:
    """They are in the shares of the step and in the lengths of the sampled completions."""
    state = intake(replace(SETTINGS, stale_policy="train", batch_groups=1))
    state.add(group(0))
    state.observe_lost({"failed": 3, "over_sampled": 6}, Counter({6: 1}))
    state.propose(0)
    batch = state.conclude(())
    assert batch is not None
    assert batch.losses.untrained == {"failed": 0.25, "over_sampled": 0.5}
    assert batch.losses.length_ks == 0.5
