r"""A tracker that posts the result of each evaluation to a chat.

'telemetry.trackers=[file,"tracker:Chat"]'    'telemetry.tracker_args={tracker\:Chat:{url:"https://..."}}'
"""

from __future__ import annotations

import json
import urllib.request

from realsys.observe.trackers.contract import Point, Run, Tracker


class Chat(Tracker):
    """Posts ``{"text": ...}`` to ``url``, as Slack and Mattermost take it."""

    def __init__(self, run: Run, url: str) -> None:
        super().__init__(run)
        self._url = url

    def log(self, point: Point) -> None:
        accuracies = {name: value for name, value in point.metrics.items() if name.endswith("/accuracy")}
        if point.kind == "eval" and accuracies:
            self._post(f"step {point.step}: " + ", ".join(f"{name} {value:.1%}" for name, value in accuracies.items()))

    def close(self, status: str) -> None:
        self._post(f"the run ended: {status}")

    def _post(self, text: str) -> None:
        body = json.dumps({"text": f"{self.run.experiment}/{self.run.trial}: {text}"}).encode()
        request = urllib.request.Request(self._url, body, {"content-type": "application/json"})
        urllib.request.urlopen(request, timeout=10).close()
