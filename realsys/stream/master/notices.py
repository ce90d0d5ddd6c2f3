"""Notices of the workers to the master: which callback gets them, and what waits for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import zmq

from realsys.errors import DecodeError, StreamError
from realsys.stream.codec import decode_message

#: notices that wait for their callback; bounded, because a misspelt handler would collect them for ever
MAX_UNCLAIMED = 4096
Notice = TypeVar("Notice", bound=msgspec.Struct)


class Notices:
    """Callbacks of the notices, and the notices that arrived before their callback."""

    def __init__(self, fail: Callable[[BaseException], None], unreadable: Callable[[int, DecodeError], None]) -> None:
        self.unclaimed: dict[str, list[tuple[int, bytes]]] = {}  # handler -> (sender, payload)
        self._callbacks: dict[str, tuple[type[msgspec.Struct], Callable[[Any], object]]] = {}
        self._fail = fail
        self._unreadable = unreadable

    def register(self, handler: str, kind: type[Notice], callback: Callable[[Notice], object]) -> None:
        """Call ``callback`` with each notice ``handler``, also with those that arrived before."""
        self._callbacks[handler] = (kind, callback)
        for sender, payload in self.unclaimed.pop(handler, []):
            self._call(sender, handler, payload)

    def receive(self, sender: int, handler: str, payload: zmq.Frame) -> None:
        """Hand the notice to its callback, or keep it until one is registered."""
        if handler in self._callbacks:
            self._call(sender, handler, payload.bytes)
        elif sum(map(len, self.unclaimed.values())) < MAX_UNCLAIMED:
            self.unclaimed.setdefault(handler, []).append((sender, payload.bytes))
        else:
            waiting = f"{MAX_UNCLAIMED} notices wait, and {handler} has no callback"
            self._fail(StreamError(f"worker {sender}: {waiting}: register one with on_notice"))

    def _call(self, sender: int, handler: str, payload: bytes) -> None:
        kind, callback = self._callbacks[handler]
        try:
            notice = decode_message(payload, kind)
        except DecodeError as err:
            self._unreadable(sender, DecodeError(f"notice {handler}: {err}"))
            return
        try:
            callback(notice)
        except Exception as exc:  # a boundary: the event loop would only log it, request() must raise it
            exc.add_note(f"while handling notice {handler} of worker {sender}")
            self._fail(exc)
