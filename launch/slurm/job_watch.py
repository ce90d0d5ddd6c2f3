"""Lines for a user who follows a job. Pure: states -> lines.

pending ──reason changes──> line ──runs──> line ──> log ──ends──> line
   ^                                        └ queued again ┘
"""

from __future__ import annotations

from realsys.launch.slurm.slurm_client import JobState

WAITS = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
LIVES = WAITS | {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}


class JobWatch:
    """One job under watch. ``ended`` is set by the first state that is final."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.ended = False
        self.exit_code: int | None = None
        self._last: tuple[str, str] | None = None
        self._ran = False

    def silent(self, problem: str) -> str:
        """SLURM does not answer. Returns a line, "" if that is known."""
        told = ("", problem)
        if told == self._last:
            return ""
        self._last = told
        return f"{problem}; the job goes on"

    def observe(self, state: JobState | None) -> str:
        """Take the next state; None: SLURM no longer knows the job. Returns a line, "" without news."""
        if state is None:
            self.ended = True
            return f"job {self.job} is not known to SLURM any more"
        told = (state.state, state.reason if state.state in WAITS else "")
        if told == self._last:
            return ""
        self._last = told
        if state.state in WAITS:
            again = " again" if self._ran else ""
            start = f"; expected to start at {state.start}" if state.start else ""
            reason = f": {state.reason}" if state.reason else ""
            return f"job {self.job} waits{again} ({state.state.lower()}{reason}{start})"
        if state.state == "RUNNING":
            self._ran = True
            return f"job {self.job} runs on {state.host}"
        if state.state in LIVES:
            return ""
        self.ended = True
        self.exit_code = state.exit_code
        code = "" if state.exit_code is None else f", exit code {state.exit_code}"
        return f"job {self.job} has ended: {state.state.lower()}{code}"
