"""Says in a line what a stopped run has kept. Pure."""

from __future__ import annotations

from realsys.launch.processes.restart_policy import NO_CHECKPOINT


def saved_line(trained: int, saved: int) -> str:
    """Return a line that says how many of the ``trained`` steps are lost.

    ``saved``: step of the newest checkpoint, or NO_CHECKPOINT.
    """
    lost = trained - max(saved, 0)
    if not trained:
        return "no step was trained yet"
    if lost <= 0:
        return f"step {saved} is saved, no step is lost"
    steps = f"{lost} trained step{'s are' if lost > 1 else ' is'} lost"
    newest = "there is no checkpoint" if saved == NO_CHECKPOINT else f"the last checkpoint has step {saved}"
    return f"{steps}: {newest}"
