"""Decisions about groups that arrive, without a manager and without a clock."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.config.dataflow import SOURCE_KEYS
from realsys.errors import Fenced, WaitTimeout
from realsys.manager.messages import (
    AllocateRequest,
    FinishRequest,
)
from realsys.train.master import intake as intake_module
from realsys.train.master.intake_decisions import IntakeSettings, IntakeState
from realsys.types import SampleMeta
from tests.support.training.master_fakes import BOUND_S, Run, run

SETTINGS = IntakeSettings(batch_groups=2, eta=1, stale_policy="drop", max_reissues=2, max_refills=10, timeout_s=10.0)
STATUS: dict[str, Any] = {
    "admission": {"reason": "staleness"},
    "ledger": dict.fromkeys(("granted", "running", "finished", "waiting", "trained", "dropped"), 0)
    | {"dropped_by_reason": {}},
}


def group(number, version=0, reissues=0):
    ticket = f"{number:010d}"
    meta = SampleMeta(f"{ticket}.{reissues}/0.0", ticket, reissues, 8, 3, 1.0, False, version, version, 0)
    meta.reissues = reissues
    return [meta]


def mixed(number, *versions):
    """A group with one token of each version."""
    [meta] = group(number)
    meta.loss_tokens = len(versions)
    meta.version_min, meta.version_max = min(versions), max(versions)
    meta.version_tokens = [(version, 1) for version in versions]
    return [meta]


def intake(settings=SETTINGS):
    return IntakeState(settings, "")


def test_batch_is_proposed_claimed_and_concluded():
    state = intake()
    state.add(group(1))
    assert state.propose(0) == []
    state.add(group(0))
    assert state.propose(0) == ["0000000000", "0000000001"]
    batch = state.conclude(())
    assert batch is not None and batch.tickets == ["0000000000", "0000000001"]
    assert (state.held(), state.version) == ([], 1)


def test_ended_tickets_leave_and_others_stay_ready():
    state = intake()
    state.add(group(0) + group(1))
    state.propose(0)
    assert state.conclude(["0000000000"]) is None
    assert state.held() == [("0000000001", 0)]
    assert [sample.ticket_id for sample in state.depart().free] == ["0000000000"]


def test_dropped_group_is_held_until_reported():
    state = intake()
    state.propose(5)
    state.add(group(0, reissues=2))  # it is too old to be trained, and was issued again often enough
    departures = state.depart()
    assert departures.dropped == [("0000000000", "masked")] and len(departures.free) == 1
    assert state.held() == [("0000000000", 2)], "the manager must not reissue it as lost"
    state.reported(departures)
    assert state.held() == [] and not state.departures


def test_wait_ends_at_its_deadline():
    state = intake()
    state.propose(0)
    state.begin_wait(100.0)
    state.check_wait(STATUS, 109.9)
    with pytest.raises(WaitTimeout, match="waited 10 s for a group and has 0 of 2"):
        state.check_wait(STATUS, 110.0)


def filtered(groups):
    drops = {"dropped": groups, "dropped_by_reason": {"filtered equal_rewards": groups}}
    return STATUS | {"ledger": STATUS["ledger"] | drops}


# ---- staleness


def test_group_too_old_on_arrival_is_issued_again():
    """At once, not after waiting for its turn."""
    state = intake()
    state.propose(2)
    state.add(group(0, version=0))
    departures = state.depart()
    assert (departures.stale, departures.dropped, len(departures.free)) == ([("0000000000", 0)], [], 1)
    assert state.held() == [("0000000000", 0)]
    state.reported(departures)
    assert state.held() == []


def test_group_too_old_at_its_turn_is_reissued():
    state = intake()
    state.propose(1)
    for number in range(2):
        state.add(group(number, version=1))
    state.add(group(2, version=0))  # its batch is the second one: trained on top of version 2
    assert state.depart().stale == [("0000000002", 0)]


def test_one_token_that_is_too_old_reissues_its_group():
    state = intake()
    state.propose(4)
    state.add(mixed(0, 0, 5))
    assert state.depart().stale == [("0000000000", 0)]


def test_prompt_is_issued_at_most_three_times():
    """After two reissues its old tokens are masked instead, and nothing is left to train."""
    state = intake()
    state.propose(5)
    for reissues in range(3):
        state.add(group(0, version=0, reissues=reissues))
        departures = state.depart()
        assert [attempt for _, attempt in departures.stale] == ([reissues] if reissues < 2 else [])
    assert departures.dropped == [("0000000000", "masked")]


def test_group_without_young_tokens_leaves_on_arrival():
    """Under `mask`, too, it does not wait for its turn."""
    state = intake(replace(SETTINGS, stale_policy="mask"))
    state.propose(5)
    state.add(group(0, version=0))
    state.add(mixed(1, 0, 5))
    assert state.depart().dropped == [("0000000000", "masked")]
    assert state.held() == [("0000000000", 0), ("0000000001", 0)]


def test_newest_too_old_group_of_each_worker_is_kept():
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


def test_group_masked_by_its_turn_is_kept():
    state = intake(replace(SETTINGS, stale_policy="mask"))
    state.add(group(0, version=0))
    state.propose(5)
    assert state.depart().kept[0].next_version == 5
    state.add(group(1) + group(1))  # the second one is a copy
    assert state.depart().kept.keys() == {0}


@pytest.mark.parametrize("policy", ["mask", "drop"])
def test_tokens_beyond_bound_are_masked_in_batch(policy):
    state = intake(replace(SETTINGS, stale_policy=policy, max_reissues=0))
    state.add(mixed(0, 1, 3) + mixed(1, 3, 4) + mixed(2, 0, 1))
    assert state.propose(4) == ["0000000000", "0000000001"], "the third has nothing left, but its turn has not come"
    batch = state.conclude(())
    assert batch is not None and [sample.loss_tokens for sample in batch.samples] == [1, 2]
    assert [sample.ticket_id for sample in batch.masked] == ["0000000000"] and batch.oldest_trained == 3
    assert batch.oldest == [3, 3] and batch.losses.untrained == {"masked": 0.25}


def test_policy_train_wastes_nothing():
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
def test_nothing_older_than_eta_is_in_any_batch(arrived, policy, eta):
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


def test_tokens_that_workers_did_not_push_are_lost():
    """They are in the shares of the step and in the lengths of the sampled completions."""
    state = intake(replace(SETTINGS, stale_policy="train", batch_groups=1))
    state.add(group(0))
    state.observe_lost({"failed": 3, "over_sampled": 6}, Counter({6: 1}))
    state.propose(0)
    batch = state.conclude(())
    assert batch.losses.untrained == {"failed": 0.25, "over_sampled": 0.5}
    assert batch.losses.length_ks == 0.5


# ---- One training side at a time, what the manager is told of what waits, and the end of a run that is told to stop


def test_step_reports_trained_tickets_staleness_and_waiting_groups():
    async def body():
        job = Run("train.total_steps=1")
        job.arrive(*[(5.0, -5.0)] * 3)
        await job.serve(job.train())
        return job

    job = run(body)
    (told,) = job.manager.told
    assert (told.trained, told.oldest) == (["0000000000", "0000000001"], [0, 0])
    assert told.held == [("0000000002", 0)], "the manager must not miss what waits here"
    assert job.records[0]["tickets"] == told.trained and job.records[0]["refused"] == 0


def test_groups_of_other_trainer_incarnation_are_freed():
    """They are neither trained nor reissued."""

    async def body():
        job = Run("train.total_steps=1")
        job.intake.state.trainer_incarnation = "0002"
        arrived = job.manager.rollouts(job.config, *[(5.0, -5.0)] * 3)
        for (_, samples), training in zip(arrived, ("0001", "0002", "0002"), strict=True):
            for sample in samples:
                sample.trainer_incarnation = training
                job.workers.held[0] |= {(k, sample.sample_id) for k in SOURCE_KEYS}
            job.intake.on_samples(samples)
        assert job.intake.state.held() == [("0000000001", 0), ("0000000002", 0)]
        await job.serve(job.train())
        return job

    job = run(body)
    (told,) = job.manager.told
    assert (told.trained, told.dropped, told.incarnation) == (["0000000001", "0000000002"], [], "0002")
    assert job.records[0]["refused"] == 2
    assert not any(job.workers.held.values()), "freed where they lay"


def test_too_old_group_is_kept_before_it_is_freed():
    async def body():
        job = Run("train.total_steps=1", "asynchronous.stale_policy=mask")
        job.intake.state.version = 9
        job.arrive((5.0, -5.0))
        await job.serve(job.intake._carry_out())
        return job

    job = run(body)
    kept, cleared = job.workers.sent
    assert kept.payload.reason == "masked" and kept.payload.next_version == 9
    assert [sample.sample_id for sample in kept.payload.samples] == cleared.payload.sample_ids
    assert not any(job.workers.held.values())


def test_arrived_group_of_cancelled_ticket_is_not_trained():
    """Its push was not acknowledged in time, and all its attempts count as failed: that is its end."""

    async def body():
        job = Run("train.total_steps=1")
        state, claim = job.manager.state, job.manager.claim
        failed, late = job.arrive(*[(5.0, -5.0)] * 2)
        state.ledger.roll_back(-1, -1, "", "", 0.0)  # as if nobody had said yet that they finished
        while state.ledger.ended(failed.ticket_id) is None:
            [ticket] = state.allocate(AllocateRequest("w", 1), 0.0).tickets
            state.finish(FinishRequest(failed.ticket_id, ticket.attempt, "w", "failed"), 0.0)

        async def another_arrives(request):
            reply = await claim(request)
            if reply.gone:
                assert reply.gone == [failed.ticket_id] and job.intake.state.held() == []
                job.arrive(*[(5.0, -5.0)] * 2)  # the one that waits, a second time, and another
            return reply

        job.manager.claim = another_arrives  # type: ignore[method-assign]
        assert state.ledger.open[late.ticket_id].state == "waiting"
        assert await job.serve(job.train()) == 1
        return job

    job = run(body)
    (told,) = job.manager.told
    assert told.trained == ["0000000001", "0000000002"], "what waits for another attempt has arrived, too"
    assert job.manager.state.ledger.ended("0000000000") == "dropped: failed"
    assert not any(job.workers.held.values()), "freed where it lay"


def test_a_training_side_that_was_replaced_ends():
    async def body():
        job = Run("train.total_steps=3")

        async def refuse(request):
            raise Fenced("gserver_manager /trained: a younger training side has started")

        job.manager.trained = refuse  # type: ignore[method-assign]
        job.arrive(*[(5.0, -5.0)] * 2)
        with pytest.raises(Fenced):
            await job.serve(job.train())
        assert job.disk.wrote == ["v1"] and job.records == [], "no checkpoint says that the step was counted"

    run(body)


def test_stopped_run_saves_without_waiting_for_batch():
    async def body():
        job = Run("train.total_steps=5")
        job.arrive(*[(5.0, -5.0)] * 2)
        running = asyncio.create_task(job.serve(job.train()))
        await asyncio.wait_for(job.manager.changed.wait(), BOUND_S)  # step 1 is told; no group is left for step 2
        job.stop.set()
        assert await asyncio.wait_for(running, BOUND_S) == 1
        return job

    assert run(body).disk.wrote == ["v1", "checkpoint 1", "stopped"]


def test_stop_request_ends_the_current_step():
    async def body():
        job = Run("train.total_steps=5")
        job.arrive(*[(5.0, -5.0)] * 4)
        publish = job.versions.begin

        async def stopped_meanwhile(version, step, saved=None):
            job.stop.set()
            return await publish(version, step)

        job.versions.begin = stopped_meanwhile  # type: ignore[method-assign]
        assert await job.serve(job.train()) == 1
        return job

    job = run(body)
    assert job.disk.wrote == ["v1", "checkpoint 1", "stopped"] and [r["step"] for r in job.records] == [1]


def test_waiting_master_reports_held_groups(monkeypatch):
    """Lost groups are generated again because the manager learns which ones the master holds."""
    monkeypatch.setattr(intake_module, "_STATUS_INTERVAL_S", 0.01)

    async def body():
        job = Run("train.total_steps=1", prompts=100)
        job.arrive((5.0, -5.0))
        (lost, samples), *_ = job.manager.rollouts(job.config, (5.0, -5.0))  # finished, and never arrived
        trained = job.manager.trained

        async def reissue(request):
            reply = await trained(request)
            if not request.trained and request.held == [("0000000000", 0)]:
                job.intake.on_samples(samples)
                reply.lost = [lost.ticket_id]
            return reply

        job.manager.trained = reissue  # type: ignore[method-assign]
        for sample in samples:
            job.workers.held[0] |= {(k, sample.sample_id) for k in SOURCE_KEYS}
        assert await job.serve(job.train()) == 1
        assert 0 in job.versions.looks, "what is published may be what no server can load: then nothing else arrives"

    run(body)
