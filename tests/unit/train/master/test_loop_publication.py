"""Steps of the loop while the version of the step before is written and published."""

from __future__ import annotations

import asyncio

import pytest

from realsys.errors import WeightsError
from tests.support.training.master_fakes import BOUND_S, Run, run


def test_step_trains_while_a_version_is_written() -> None:
    """The step is reported before its version is published, and its checkpoint is due then."""

    async def body() -> Run:
        job = Run("train.total_steps=2")
        job.versions.holds = True
        job.arrive(*[(5.0, -5.0)] * 4)
        running = asyncio.create_task(job.serve(job.loop.run()))
        await job.versions.awaited.wait()
        assert any(call.step == 2 and call.mfc == "actor_train" for call in job.calls())
        assert job.manager.told[-1].trained and job.disk.wrote == ["checkpoint 1"]
        await _complete_both(job)
        assert await running == 2
        return job

    assert run(body).disk.wrote == ["checkpoint 1", "v1", "checkpoint 2", "v2", "finish"]


async def _complete_both(job: Run) -> None:
    """End the publication that runs, and the next one when it has begun."""
    assert await job.versions.begun.get() == 1
    job.versions.complete()
    assert await job.versions.begun.get() == 2
    job.versions.complete()


def test_without_lag_step_waits_for_publication() -> None:
    """With eta = 0 the manager grants no ticket of the next batch before it knows the version."""

    async def body() -> None:
        job = Run("train.total_steps=2", "asynchronous.max_staleness=0")
        job.versions.holds = True
        assert len(job.arrive(*[(5.0, -5.0)] * 4)) == 2
        running = asyncio.create_task(job.serve(job.loop.run()))
        assert await job.versions.begun.get() == 1
        await job.manager.changed.wait()
        assert job.arrive(*[(5.0, -5.0)] * 2) == []
        job.versions.complete()
        assert [ticket.version for ticket in job.arrive(*[(5.0, -5.0)] * 2)] == [1, 1]
        assert await job.versions.begun.get() == 2
        job.versions.complete()
        assert await running == 2
        assert [record["staleness"]["histogram"] for record in job.records] == [{"0": 4}, {"0": 4}]

    run(body)


def test_failed_write_ends_the_wait_for_groups() -> None:
    async def body() -> None:
        job = Run("train.total_steps=2")
        job.versions.holds = True
        job.arrive(*[(5.0, -5.0)] * 2)
        running = asyncio.create_task(job.serve(job.loop.run()))
        await asyncio.wait_for(job.manager.changed.wait(), BOUND_S)  # no group is left for step 2
        job.versions.broken.set()
        with pytest.raises(WeightsError, match="No space left on device"):
            await running
        assert "finish" not in job.disk.wrote

    run(body)


@pytest.mark.parametrize("stopped", [False, True], ids=["end", "stop"])
def test_last_checkpoint_waits_for_the_last_version(stopped: bool) -> None:
    async def body() -> list[str]:
        job = Run("train.total_steps=1" if not stopped else "train.total_steps=5")
        job.versions.holds = True
        job.arrive(*[(5.0, -5.0)] * 2)
        running = asyncio.create_task(job.serve(job.loop.run()))
        await asyncio.wait_for(job.manager.changed.wait(), BOUND_S)
        if stopped:
            job.stop.set()
        await job.versions.awaited.wait()
        assert job.disk.wrote == ["checkpoint 1"]
        job.versions.complete()
        assert await running == 1
        return job.disk.wrote

    assert run(body) == ["checkpoint 1", "v1", "stopped" if stopped else "finish"]


def test_evaluation_starts_after_its_version_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        job = Run("train.total_steps=2", "evaluation.every_steps=1")
        seen: list[tuple[str, int]] = []

        async def start(eval_id: str, step: int) -> None:
            seen.append((eval_id, job.manager.state.version))

        monkeypatch.setattr(job.loop, "start_evaluation", start)
        job.versions.holds = True
        job.arrive(*[(5.0, -5.0)] * 4)
        running = asyncio.create_task(job.serve(job.loop.run()))
        await job.versions.awaited.wait()
        assert seen == []
        await _complete_both(job)
        await running
        assert seen == [("step-1", 1)]

    run(body)
