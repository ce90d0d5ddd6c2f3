"""Lines about a job that is followed."""

from __future__ import annotations

from realsys.launch.slurm.client import JobState, JobWatch


def test_life_of_a_job_that_is_queued_again() -> None:
    watch = JobWatch("7")
    states = [
        JobState("PENDING", "Priority"),
        JobState("PENDING", "Priority"),
        JobState("PENDING", "Resources", start="2026-01-02T03:04:05"),
        JobState("RUNNING", host="a1"),
        JobState("COMPLETING"),
        JobState("PENDING", "BeginTime"),
        JobState("RUNNING", host="a2"),
        JobState("COMPLETED", exit_code=0),
    ]
    assert [line for state in states if (line := watch.observe(state))] == [
        "job 7 waits (pending: Priority)",
        "job 7 waits (pending: Resources; expected to start at 2026-01-02T03:04:05)",
        "job 7 runs on a1",
        "job 7 waits again (pending: BeginTime)",
        "job 7 runs on a2",
        "job 7 has ended: completed, exit code 0",
    ]
    assert watch.ended and watch.exit_code == 0


def test_job_that_slurm_forgot_has_ended() -> None:
    watch = JobWatch("7")
    assert watch.observe(None) == "job 7 is not known to SLURM any more"
    assert watch.ended and watch.exit_code is None


def test_silence_of_slurm_is_told_once() -> None:
    watch = JobWatch("7")
    assert [watch.silent("squeue: x") for _ in range(2)] == ["squeue: x; the job goes on", ""]
    assert not watch.ended
