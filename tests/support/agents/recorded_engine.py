"""The embedded engine, which also writes the tokens that it was sent and returned to a file.

generation.backend=tests.support.agents.recorded_engine:Recorded generation.backend_args.path=FILE
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from realsys.config.schema import Config
from realsys.generation.backend import EngineParts
from realsys.generation.completion import Completion
from realsys.generation.embedded.backend import EmbeddedBackend
from realsys.generation.protocol import SamplingParams


class Recorded(EmbeddedBackend):
    def __init__(self, config: Config, path: str) -> None:
        super().__init__(config)
        self._path = Path(path)

    def build(self, parts: EngineParts) -> Any:
        return RecordedEngine(super().build(parts), self._path)


class RecordedEngine:
    def __init__(self, engine: Any, path: Path) -> None:
        self._engine = engine
        self._path = path
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, rid: str, input_ids: Sequence[int], params: SamplingParams, *, stream: bool = False
    ) -> Future[list[Completion]]:
        future = self._engine.generate(rid, input_ids, params, stream=stream)
        future.add_done_callback(lambda done: self._record(list(input_ids), done))
        return future

    def _record(self, sent: list[int], done: Future[list[Completion]]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        lines = [
            json.dumps({"sent": sent, "tokens": c.tokens.tolist(), "logprobs": c.logprobs.tolist()})
            for c in done.result()
        ]
        with self._lock, self._path.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))
