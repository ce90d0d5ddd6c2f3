"""Lines about an evaluation that runs: which part of its completions is there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from realsys.launch.screen.plain import PlainView
from realsys.launch.screen.progress import Progress, Record, number

_EVERY_S = 5.0


class EvaluationView(PlainView):
    """View that prints phases, results, and every few seconds the progress of each evaluation."""

    _shown_at = 0.0
    _shown = ""

    def refresh(self, progress: Progress, new: Iterable[Record] = ()) -> None:
        super().refresh(progress, new)
        if time.monotonic() < self._shown_at + _EVERY_S:
            return
        line = progress_line(progress.status.get("evaluations"))
        if line and line != self._shown:
            self._shown_at, self._shown = time.monotonic(), line
            self._print(line)


def progress_line(evaluations: object) -> str:
    """Return the progress of the unfinished evaluations of a manager's status; "" without any."""
    if not isinstance(evaluations, Mapping):
        return ""
    parts = []
    for name, state in evaluations.items():
        done, failed, total = (int(number(state, key) or 0) for key in ("done", "failed", "total"))
        if done + failed < total:
            parts.append(f"{name} {done + failed}/{total}" + (f" ({failed} failed)" if failed else ""))
    return ", ".join(parts)
