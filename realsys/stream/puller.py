"""The receiving end of the push-pull stream (see ``push_pull``)."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from realsys.cluster.fence import CheckAlive, unleased
from realsys.errors import DecodeError, StreamError
from realsys.stream import sockets
from realsys.stream import wire as protocol
from realsys.stream.codec import decode_group, decode_with
from realsys.stream.security import CurveKeys
from realsys.stream.wire import PushAck, PushNack
from realsys.types import Group

log = logging.getLogger(__name__)

MAX_ANSWERED = 1 << 16  # sequences remembered of a sender; a Pusher has a handful under way


@dataclass(slots=True)
class PullerStats:
    received: int = 0  # handed to on_group and stored
    duplicates: int = 0
    malformed: int = 0  # did not decode
    refused: int = 0  # decoded, but on_group would not have it
    rejected: int = 0  # peers that were not let in: a wrong key, or none


@dataclass(slots=True)
class _Sender:
    """What one pusher was answered: sequence -> reason of refusal, None if stored. None new is below ``floor``."""

    floor: int = 0
    answered: dict[int, str | None] = field(default_factory=dict)

    def raise_floor(self, floor: int) -> None:
        if floor > self.floor:
            self.floor = floor
            self.answered = {s: reason for s, reason in self.answered.items() if s >= floor}

    def note(self, sequence: int, reason: str | None, floor: int) -> None:
        """``sequence`` is answered; the sender will not send again what is below ``floor``."""
        self.raise_floor(min(floor, sequence))
        self.answered[sequence] = reason
        if len(self.answered) > MAX_ANSWERED:  # its floor does not rise: it is broken, or waits for one that was lost
            self.raise_floor(sorted(self.answered)[MAX_ANSWERED // 2])


class Puller:
    """The receiving end: bound at once to a port of the system's choice, so ``address`` may be registered.

    To be used by one thread: poll ``socket``, then call ``drain``; poll ``monitor``, then call ``count_rejected``.
    """

    MAX_SENDERS = 10_000
    RECEIVE_LIMIT = 64  # groups per sender waiting in memory; beyond it TCP holds them back

    def __init__(
        self, host: str = "127.0.0.1", *, keys: CurveKeys | None = None, check_alive: CheckAlive = unleased
    ) -> None:
        """``check_alive``: asked before a group is stored or acknowledged; what it raises comes out of ``drain``."""
        self._check_alive = check_alive
        self._server = sockets.bind_server(host, keys, receive_limit=self.RECEIVE_LIMIT)
        self.address = self._server.address
        self.stats = PullerStats()
        self._senders: OrderedDict[str, _Sender] = OrderedDict()

    @property
    def socket(self) -> sockets.ZSocket:
        return self._server.socket

    @property
    def monitor(self) -> sockets.ZSocket:
        return self._server.monitor

    def count_rejected(self) -> None:
        """Take in what waits on ``monitor``."""
        while True:
            try:
                self._server.reject(self.monitor.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                break
        self.stats.rejected = self._server.rejected

    def drain(self, on_group: Callable[[Group], object], budget: int = 16) -> int:
        """Take up to ``budget`` waiting messages and return how many there were.

        ``on_group`` stores a group, or raises StreamError to refuse it: the sender is told. Any other exception
        is a defect and passes through; the group is not acknowledged.
        """
        stored: dict[bytes, list[int]] = {}  # route -> sequences: one acknowledgement for all that waited
        taken = 0
        try:
            while taken < budget:
                try:
                    frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                taken += 1
                self._take(frames, on_group, stored)
        finally:
            for route, sequences in stored.items():
                self._answer(route, PushAck(sequences))
        return taken

    def close(self) -> None:
        self._server.close()

    def _take(
        self,
        frames: list[zmq.Frame],
        on_group: Callable[[Group], object],
        stored: dict[bytes, list[int]],
    ) -> None:
        try:
            if len(frames) < 2:
                raise DecodeError("an empty message")
            push = decode_with(protocol.TO_PULLER, frames[1], "push header")
        except DecodeError as err:
            self._malformed(frames, err)
            return
        sender = self._sender(push.identity)
        if push.sequence < sender.floor or push.sequence in sender.answered:
            self.stats.duplicates += 1
            reason = sender.answered.get(push.sequence, "its sender has given it up")
        else:
            reason = self._store(frames, push.identity, on_group)
            sender.note(push.sequence, reason, push.floor)
        route = frames[0].bytes
        if reason is None:
            stored.setdefault(route, []).append(push.sequence)
        else:
            self._answer(route, PushNack(push.sequence, reason))

    def _store(self, frames: list[zmq.Frame], identity: str, on_group: Callable[[Group], object]) -> str | None:
        """Hand the group over; the reason if it is refused."""
        try:
            group = decode_group(frames[2:])
        except DecodeError as err:
            self._malformed(frames, err)
            return str(err)
        self._check_alive()
        try:
            on_group(group)
        except StreamError as err:
            self.stats.refused += 1
            log.warning("puller %s: refused group of %s: %s", self.address, identity, err)
            return str(err)
        self.stats.received += 1
        return None

    def _sender(self, identity: str) -> _Sender:
        sender = self._senders.get(identity)
        if sender is None:
            sender = self._senders[identity] = _Sender()
            if len(self._senders) > self.MAX_SENDERS:
                self._senders.popitem(last=False)
        self._senders.move_to_end(identity)
        return sender

    def _malformed(self, frames: list[zmq.Frame], err: DecodeError) -> None:
        self.stats.malformed += 1
        if sockets.worth_logging(self.stats.malformed):
            sender = sockets.sender_of(frames)
            log.warning("puller %s: dropped message %d from %s: %s", self.address, self.stats.malformed, sender, err)

    def _answer(self, route: bytes, answer: PushAck | PushNack) -> None:
        self._check_alive()
        try:
            self.socket.send_multipart([route, msgspec.msgpack.encode(answer)], zmq.NOBLOCK)
        except zmq.ZMQError as err:
            if err.errno != zmq.EHOSTUNREACH:
                raise
            # the sender is gone or reconnecting; if it resends it is answered then
