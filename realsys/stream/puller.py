"""The receiving end of the push-pull stream (see ``push_pull``).

Invariants
    store-once       A sequence of an identity is handed to ``on_group`` at most once. A resent one gets
                     the same outcome again, because its first acknowledgement may be lost.
    store-then-ack   A PushAck leaves after ``on_group`` has returned. The sender discards the group then.
    bounded-memory   Outcomes below a sender's floor are discarded, and so are the senders that have been
                     silent longest.
"""

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

#: outcomes remembered of one sender; a Pusher has a handful of groups in flight
MAX_OUTCOMES = 1 << 16


@dataclass(slots=True)
class PullerStats:
    """Counts since the puller was created."""

    received: int = 0  # handed to on_group and stored
    duplicates: int = 0
    malformed: int = 0  # did not decode
    refused: int = 0  # decoded, but on_group refused it
    rejected: int = 0  # peers that were not let in: a wrong key, or none


@dataclass(slots=True)
class _Sender:
    """Outcomes of one pusher's groups: sequence -> reason of refusal, None if stored.

    No sequence below ``floor`` is new: the sender has its outcome, or has cancelled the push.
    """

    floor: int = 0
    outcomes: dict[int, str | None] = field(default_factory=dict)

    def raise_floor(self, floor: int) -> None:
        """Discard the outcomes below ``floor``, if it is higher than the current floor."""
        # A floor never falls: a late duplicate carries the lower floor of its time.
        if floor > self.floor:
            self.floor = floor
            self.outcomes = {s: reason for s, reason in self.outcomes.items() if s >= floor}

    def note(self, sequence: int, reason: str | None, floor: int) -> None:
        """Remember the outcome of ``sequence``. The sender will not resend anything below ``floor``."""
        # min(): a broken sender may send a floor above the sequence, which would discard the outcome.
        self.raise_floor(min(floor, sequence))
        self.outcomes[sequence] = reason
        # The floor of a broken sender does not rise. Half of the outcomes go in one step, so that the
        # sort is not paid for every group after this.
        if len(self.outcomes) > MAX_OUTCOMES:
            self.raise_floor(sorted(self.outcomes)[MAX_OUTCOMES // 2])


class Puller:
    """The receiving end. Creating it binds a free port, so ``address`` may be registered.

    Use it in one thread: poll ``socket``, then call ``drain``; poll ``monitor``, then call
    ``count_rejected``.
    """

    MAX_SENDERS = 10_000
    RECEIVE_LIMIT = 64  # groups per sender waiting in memory; beyond it TCP holds them back

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        keys: CurveKeys | None = None,
        check_alive: CheckAlive = unleased,
    ) -> None:
        """``check_alive`` runs before a group is stored or acknowledged; ``drain`` raises its error."""
        self._check_alive = check_alive
        self._server = sockets.bind_server(host, keys, receive_limit=self.RECEIVE_LIMIT)
        self.address = self._server.address
        self.stats = PullerStats()
        self._senders: OrderedDict[str, _Sender] = OrderedDict()  # the longest silent first

    @property
    def socket(self) -> sockets.ZSocket:
        return self._server.socket

    @property
    def monitor(self) -> sockets.ZSocket:
        return self._server.monitor

    def count_rejected(self) -> None:
        """Count and log the rejected peers that ``monitor`` reports."""
        while True:
            try:
                self._server.reject(self.monitor.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                break
        self.stats.rejected = self._server.rejected

    def drain(self, on_group: Callable[[Group], object], budget: int = 16) -> int:
        """Receive up to ``budget`` waiting messages and return how many there were.

        ``on_group`` stores a group, or raises StreamError to refuse it, which the sender's push then
        raises. Any other exception is a defect and passes through; the group is not acknowledged.
        """
        stored: dict[bytes, list[int]] = {}  # route -> sequences; one PushAck for all of a sender
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
            # Also after an exception: the groups before it are stored. Without their acknowledgement
            # the sender would push them to the next incarnation of this head a second time.
            for route, sequences in stored.items():
                self._acknowledge(route, PushAck(sequences))
        return taken

    def close(self) -> None:
        """Close the sockets. Groups that wait in them stay with their senders."""
        self._server.close()

    def _take(
        self,
        frames: list[zmq.Frame],
        on_group: Callable[[Group], object],
        stored: dict[bytes, list[int]],
    ) -> None:
        try:
            if len(frames) < 2:
                raise DecodeError("the message is empty")
            push = decode_with(protocol.TO_PULLER, frames[1], "push header")
        except DecodeError as err:
            # No acknowledgement: without a header there is no sequence to name.
            self._drop(frames, err)
            return
        # The identity in the header, not the route: a reconnection gives the sender a new route.
        sender = self._sender(push.identity)
        if push.sequence < sender.floor or push.sequence in sender.outcomes:
            self.stats.duplicates += 1
            # Below the floor the outcome is discarded. Only a copy of a cancelled push can be there,
            # and to store it now would train a group whose attempt has ended.
            reason = sender.outcomes.get(push.sequence, "its sender has cancelled it")
        else:
            reason = self._store(frames, push.identity, on_group)
            sender.note(push.sequence, reason, push.floor)
        route = frames[0].bytes
        if reason is None:
            stored.setdefault(route, []).append(push.sequence)
        else:
            self._acknowledge(route, PushNack(push.sequence, reason))

    def _store(self, frames: list[zmq.Frame], identity: str, on_group: Callable[[Group], object]) -> str | None:
        """Decode the group and hand it over; return the reason if it is refused."""
        try:
            group = decode_group(frames[2:])
        except DecodeError as err:
            self._drop(frames, err)
            return str(err)
        # After decoding, which takes longest: the lease must hold when the group is stored.
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
            # Every restart of a worker brings a new identity, so the number of them has no bound.
            if len(self._senders) > self.MAX_SENDERS:
                self._senders.popitem(last=False)
        self._senders.move_to_end(identity)
        return sender

    def _drop(self, frames: list[zmq.Frame], err: DecodeError) -> None:
        self.stats.malformed += 1
        if sockets.worth_logging(self.stats.malformed):
            source = f"dropped message {self.stats.malformed} from {sockets.sender_of(frames)}"
            log.warning("puller %s: %s: %s", self.address, source, err)

    def _acknowledge(self, route: bytes, acknowledgement: PushAck | PushNack) -> None:
        # Again before the send: storing may have taken longer than the lease.
        self._check_alive()
        try:
            self.socket.send_multipart([route, msgspec.msgpack.encode(acknowledgement)], zmq.NOBLOCK)
        except zmq.ZMQError as err:
            if err.errno != zmq.EHOSTUNREACH:
                raise
            # The sender is gone or reconnecting. If it resends the group, it gets the outcome then.
