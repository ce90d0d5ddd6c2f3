"""The tracker of docs/examples/tracker.py posts what it says."""

from __future__ import annotations

import importlib
import io
import json
import sys
import urllib.request
from pathlib import Path

import pytest

from realsys.config.doors import TRACKER
from realsys.observe.step_fields import metrics_of
from realsys.observe.trackers.contract import Point, Run
from tests.support.telemetry.step_logs import evaluation, train

DOCS = Path(__file__).resolve().parents[4] / "docs"


def test_example_posts_each_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[str] = []

    def taken(request: urllib.request.Request, timeout: float) -> io.BytesIO:
        assert request.full_url == "https://chat/hook" and isinstance(request.data, bytes)
        posted.append(json.loads(request.data)["text"])
        return io.BytesIO()

    monkeypatch.syspath_prepend(str(DOCS / "examples"))
    monkeypatch.setattr(urllib.request, "urlopen", taken)
    importlib.invalidate_caches()
    tracker = TRACKER.make("tracker:Chat", Run("sums", "t", tmp_path), {"url": "https://chat/hook"})
    for record in (train(1), evaluation(50), evaluation(60, complete=False)):
        tracker.log(Point(record["kind"], record["step"], 0.0, 0, metrics_of(record)))
    tracker.close("done")
    assert posted == ["sums/t: step 50: eval/eval/accuracy 50.0%", "sums/t: the run ended: done"]
    sys.modules.pop("tracker")
