"""The stream between a ModelWorker and its master, without the master."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

Script = Sequence[tuple[str, msgspec.Struct]]


class Message:
    """A request as the stream delivers it: encoded."""

    def __init__(self, handler: str, payload: msgspec.Struct) -> None:
        self.handler, self._payload = handler, msgspec.msgpack.encode(payload)

    def decode(self, type: Any) -> Any:
        return msgspec.msgpack.decode(self._payload, type=type)


class PlayedMaster:
    """Hands out a script of requests, then stops the loop."""

    def __init__(self, script: Script, stop: threading.Event) -> None:
        self._script, self._stop = deque(Message(*entry) for entry in script), stop
        self.replies: list[Any] = []
        self.errors: list[str] = []

    def next_request(self, timeout_s: float) -> Message | None:
        if self._script:
            return self._script.popleft()
        self._stop.set()
        return None

    def serve_in_background(self, *handlers: str) -> None:
        """The script is served in its order, on the main thread."""

    def next_background(self, timeout_s: float) -> None:
        self._stop.wait(timeout_s)

    def reply(self, request: Message, payload: msgspec.Struct) -> None:
        self.replies.append(payload)

    def reply_error(self, request: Message, exc: BaseException) -> None:
        self.errors.append(f"{type(exc).__name__}: {exc}")

    def notify(self, handler: str, payload: msgspec.Struct) -> None:
        raise AssertionError(f"nobody asked for a notice {handler}")
