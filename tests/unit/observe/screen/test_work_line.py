"""Progress line of long commands."""

from __future__ import annotations

import io

from rich.console import Console

from realsys.observe.screen.terminal import WorkLine


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _shown(seconds: float, *, terminal: bool) -> str:
    """Return what a command prints that does one of 100 parts each second."""
    clock, text = _Clock(), io.StringIO()
    line = WorkLine("plan", Console(file=text, force_terminal=terminal, width=60, color_system=None), clock)
    while clock.now < seconds:
        clock.now += 1.0
        line.show(clock.now, 100, f"{clock.now:.0f} of 100 simulations")
    line.clear()
    return text.getvalue()


def test_piped_progress_has_a_line_every_ten_seconds() -> None:
    assert _shown(12, terminal=False).splitlines() == [
        "realsys: plan: 1 of 100 simulations, 1%, 1:39 left",
        "realsys: plan: 11 of 100 simulations, 11%, 1:29 left",
    ]


def test_terminal_progress_redraws_one_line() -> None:
    shown = _shown(3, terminal=True)
    assert "\n" not in shown
    assert shown.split("\r\x1b[K")[-2:] == ["realsys: plan: 3 of 100 simulations, 3%, 1:37 left", ""]


def test_progress_without_work_done_has_no_estimate() -> None:
    text = io.StringIO()
    WorkLine("regrade", Console(file=text, width=80), _Clock()).show(0, 5, "now step 1")
    assert text.getvalue() == "realsys: regrade: now step 1, 0%\n"
