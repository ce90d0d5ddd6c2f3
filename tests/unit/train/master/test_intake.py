"""One training side at a time, what the manager is told of what waits, and the end of a run that is told to stop."""

from __future__ import annotations

import asyncio

import pytest

from realsys.config.dataflow import SOURCE_KEYS
from realsys.errors import Fenced
from realsys.manager.messages import (
    AllocateRequest,
    ClaimReply,
    ClaimRequest,
    FinishRequest,
    TrainedReply,
    TrainedRequest,
)
from realsys.train.master import loop as intake_module
from tests.support.training.master_fakes import BOUND_S, Run, run


def test_step_reports_trained_tickets_staleness_and_waiting_groups() -> None:
    async def body() -> Run:
        job = Run("train.total_steps=1")
        job.arrive(*[(5.0, -5.0)] * 3)
        await job.serve(job.loop.run())
        return job

    job = run(body)
    (told,) = job.manager.told
    assert (told.trained, told.oldest) == (["0000000000", "0000000001"], [0, 0])
    assert told.held == [("0000000002", 0)], "the manager must not miss what waits here"
    assert job.records[0]["tickets"] == told.trained and job.records[0]["refused"] == 0


def test_groups_of_other_trainer_incarnation_are_freed() -> None:
    """They are neither trained nor reissued."""

    async def body() -> Run:
        job = Run("train.total_steps=1")
        job.intake.state.trainer_incarnation = "0002"
        arrived = job.manager.rollouts(job.config, *[(5.0, -5.0)] * 3)
        for (_, samples), training in zip(arrived, ("0001", "0002", "0002"), strict=True):
            for sample in samples:
                sample.trainer_incarnation = training
                job.workers.held[0] |= {(k, sample.sample_id) for k in SOURCE_KEYS}
            job.intake.on_samples(samples)
        assert job.intake.state.held() == [("0000000001", 0), ("0000000002", 0)]
        await job.serve(job.loop.run())
        return job

    job = run(body)
    (told,) = job.manager.told
    assert (told.trained, told.dropped, told.incarnation) == (["0000000001", "0000000002"], [], "0002")
    assert job.records[0]["refused"] == 2
    assert not any(job.workers.held.values()), "freed where they lay"


def test_too_old_group_is_kept_before_it_is_freed() -> None:
    async def body() -> Run:
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


def test_arrived_group_of_cancelled_ticket_is_not_trained() -> None:
    """Its push was not acknowledged in time, and all its attempts count as failed: that is its end."""

    async def body() -> Run:
        job = Run("train.total_steps=1")
        state, claim = job.manager.state, job.manager.claim
        failed, late = job.arrive(*[(5.0, -5.0)] * 2)
        state.ledger.roll_back(-1, -1, "", "", 0.0)  # as if nobody had said yet that they finished
        while state.ledger.ended(failed.ticket_id) is None:
            [ticket] = state.allocate(AllocateRequest("w", 1), 0.0).tickets
            state.finish(FinishRequest(failed.ticket_id, ticket.attempt, "w", "failed"), 0.0)

        async def another_arrives(request: ClaimRequest) -> ClaimReply:
            reply = await claim(request)
            if reply.gone:
                assert reply.gone == [failed.ticket_id] and job.intake.state.held() == []
                job.arrive(*[(5.0, -5.0)] * 2)  # the one that waits, a second time, and another
            return reply

        job.manager.claim = another_arrives  # type: ignore[method-assign]
        assert state.ledger.open[late.ticket_id].state == "waiting"
        assert await job.serve(job.loop.run()) == 1
        return job

    job = run(body)
    (told,) = job.manager.told
    assert told.trained == ["0000000001", "0000000002"], "what waits for another attempt has arrived, too"
    assert job.manager.state.ledger.ended("0000000000") == "dropped: failed"
    assert not any(job.workers.held.values()), "freed where it lay"


def test_a_training_side_that_was_replaced_ends() -> None:
    async def body() -> None:
        job = Run("train.total_steps=3")

        async def refuse(request: TrainedRequest) -> TrainedReply:
            raise Fenced("gserver_manager /trained: a younger training side has started")

        job.manager.trained = refuse  # type: ignore[method-assign]
        job.arrive(*[(5.0, -5.0)] * 2)
        with pytest.raises(Fenced):
            await job.serve(job.loop.run())
        assert job.disk.wrote == ["v1"] and job.records == [], "no checkpoint says that the step was counted"

    run(body)


def test_stopped_run_saves_without_waiting_for_batch() -> None:
    async def body() -> Run:
        job = Run("train.total_steps=5")
        job.arrive(*[(5.0, -5.0)] * 2)
        running = asyncio.create_task(job.serve(job.loop.run()))
        await asyncio.wait_for(job.manager.changed.wait(), BOUND_S)  # step 1 is told; no group is left for step 2
        job.stop.set()
        assert await asyncio.wait_for(running, BOUND_S) == 1
        return job

    assert run(body).disk.wrote == ["v1", "checkpoint 1", "stopped"]


def test_stop_request_ends_the_current_step() -> None:
    async def body() -> Run:
        job = Run("train.total_steps=5")
        job.arrive(*[(5.0, -5.0)] * 4)
        publish = job.versions.begin

        async def stopped_meanwhile(version: int, step: int, saved: object = None) -> dict[str, float]:
            job.stop.set()
            return await publish(version, step)

        job.versions.begin = stopped_meanwhile  # type: ignore[method-assign]
        assert await job.serve(job.loop.run()) == 1
        return job

    job = run(body)
    assert job.disk.wrote == ["v1", "checkpoint 1", "stopped"] and [r["step"] for r in job.records] == [1]


def test_waiting_master_reports_held_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lost groups are generated again because the manager learns which ones the master holds."""
    monkeypatch.setattr(intake_module, "_STATUS_INTERVAL_S", 0.01)

    async def body() -> None:
        job = Run("train.total_steps=1", prompts=100)
        job.arrive((5.0, -5.0))
        (lost, samples), *_ = job.manager.rollouts(job.config, (5.0, -5.0))  # finished, and never arrived
        trained = job.manager.trained

        async def reissue(request: TrainedRequest) -> TrainedReply:
            reply = await trained(request)
            if not request.trained and request.held == [("0000000000", 0)]:
                job.intake.on_samples(samples)
                reply.lost = [lost.ticket_id]
            return reply

        job.manager.trained = reissue  # type: ignore[method-assign]
        for sample in samples:
            job.workers.held[0] |= {(k, sample.sample_id) for k in SOURCE_KEYS}
        assert await job.serve(job.loop.run()) == 1
        assert 0 in job.versions.looks, "what is published may be what no server can load: then nothing else arrives"

    run(body)
