"""A step log that is followed by a tracker with its real library, over restarts and a roll-back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from realsys.config.doors import TRACKER
from realsys.observe.trackers.contract import Run
from realsys.observe.trackers.process import Feed
from tests.support.run_logs import append


class Followed:
    """A trial whose step log one tracker follows."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.steps = folder, folder / "steps.jsonl"
        self.config = {"seed": 1, "train": {"lr": 1e-4, "stop": []}, "model": {"path": "x" * 9000}}

    def start(self, name: str, **arguments: Any) -> Feed:
        """Return the tracker at its position, as at a start of the trial."""
        run = Run("arith", "first", self.folder, self.config, "0.1.0")
        make = TRACKER.load(name)
        return Feed(self.steps, self.folder / "trackers" / f"{name}.json", run, lambda told: make(told, **arguments))

    def play(self, name: str, *parts: list[Mapping[str, Any]], **arguments: Any) -> None:
        """Start the tracker once for each of ``parts``, which the step log gets then."""
        for records in parts:
            feed = self.start(name, **arguments)
            append(self.steps, *records)
            while feed.deliver():
                pass
            feed.close("done")

    def crash(self, name: str, *records: Mapping[str, Any], **arguments: Any) -> None:
        """Deliver ``records`` and die before the trial notes it."""
        feed = self.start(name, **arguments)
        append(self.steps, *records)
        feed._save = lambda: None  # type: ignore[method-assign]
        feed.deliver()
        feed.close("")


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path)
