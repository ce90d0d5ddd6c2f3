"""Program: a program that answers calls, from the outside. Nothing that it sends is trusted."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from typing import Any

from realsys.sandbox.inside import plain
from realsys.sandbox.limits import CRASHED, MEMORY, OUTPUT, WALL
from realsys.sandbox.zygote_process import Child

_LONG_S = 0.2  # a call that took less shares its limits with the next
_CHUNK = 1 << 16


class ProgramRaised(Exception):
    """The program raised an exception, or has ended (``gone``). ``reason``: one of ``limits.REASONS``."""

    def __init__(self, reason: str, message: str, *, gone: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        self.gone = gone


class Program:
    """A program that answers calls."""

    def __init__(self, child: Child, link: socket.socket) -> None:
        self._child = child
        self._link = link
        self._loaded = False

    @property
    def time_s(self) -> float:
        """Return its time since its start; once it has ended, without the time in which it had no processor."""
        ended = self._child.ended
        return time.monotonic() - self._child.born if ended is None else ended.own_s

    def call(self, name: str, arguments: list[Any], most: int = plain.MAX_FRAME) -> Any:
        """Return the plain data that a function returns, of at most ``most`` bytes. Raises ProgramRaised."""
        if not self._loaded:
            self._receive(most)
            self._loaded = True
        if time.monotonic() - self._child.begin > _LONG_S:
            self._child.mark()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            plain.send(self._link.fileno(), plain.encode(("call", name, arguments, {})))
        return self._receive(most)

    def _receive(self, most: int) -> Any:
        descriptor = self._link.fileno()
        begin = time.monotonic()
        data = bytearray()
        wanted = plain.LENGTH.size
        while len(data) < wanted:
            self._wait(descriptor, begin)
            try:
                chunk = os.read(descriptor, min(_CHUNK, wanted - len(data)))
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise self._gone()
            data += chunk
            if len(data) == plain.LENGTH.size:
                wanted += plain.LENGTH.unpack(data)[0]
                if wanted > most + plain.LENGTH.size:
                    raise ProgramRaised(OUTPUT, "the result is too long")
        try:
            answer = plain.decode(bytes(data[plain.LENGTH.size :]))
        except plain.PlainError as error:
            raise ProgramRaised(CRASHED, str(error)) from None
        match answer:
            case ("ok", result):
                return result
            case ("raised", [str() as name, *_], str() as text):
                reason = MEMORY if name == "MemoryError" else CRASHED
                raise ProgramRaised(reason, f"{name}: {text}"[:300], gone=not self._loaded)
        raise ProgramRaised(CRASHED, "the result cannot be read")

    def _wait(self, descriptor: int, begin: float) -> None:
        """Wait until the program sends something. Raises ProgramRaised if this call takes too long."""
        left_s = max(0.0, self._child.limits.wall_s - (time.monotonic() - begin))
        while not select.select([descriptor], [], [], min(left_s, self._child.left_s))[0]:
            left_s = self._child.limits.wall_s - self._child.own_s(begin)
            if left_s <= 0:
                self._child.kill(WALL)
                raise ProgramRaised(WALL, "no result in time")
            if self._child.left_s <= 0:
                raise self._child.zygote.starved(self._child)

    def _gone(self) -> ProgramRaised:
        """Return why the program has ended, or has closed its end of the link."""
        ended = self._child.zygote.last(self._child)
        return ProgramRaised(ended.reached or CRASHED, "the program ended")
