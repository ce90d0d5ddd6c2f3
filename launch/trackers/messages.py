"""Messages between the launcher and the process of the trackers.

    launcher ──Order──> a file in memory
             ──Ended──> stdin of the process
             <──Report─ a pipe: stdout and stderr of the process belong to the libraries, and go to a log

A message is one line of JSON.
"""

from __future__ import annotations

from typing import Any

import msgspec

MODULE = "realsys.launch.trackers.process"
LONGEST_TEXT = 500


class Order(msgspec.Struct):
    """Work of the process. ``trackers``: name -> arguments; ``folder``: the trial; ``parent``: pid of the launcher."""

    trackers: dict[str, dict[str, Any]]
    folder: str
    experiment: str
    trial: str
    version: str
    parent: int
    config: dict[str, Any] = {}


class Ended(msgspec.Struct):
    """The run has ended with ``status``. Trackers have ``finish_s`` seconds to finish."""

    status: str
    finish_s: float


class Report(msgspec.Struct):
    """Note for the screen."""

    text: str


def line(message: msgspec.Struct) -> bytes:
    """Return a message as one line."""
    return msgspec.json.encode(message) + b"\n"
