"""The push-pull stream: finished groups from RolloutWorkers to the data-parallel heads.

    RolloutWorker: Pusher.push ──Push + group──> Puller (in the I/O thread of a DP head) ──> on_group
                        ^                               |
                        └────── PushAck | PushNack <────┘  after on_group has stored it

``push`` returns when the puller has stored the group, so closing a pusher whose pushes have returned loses nothing. The
pusher keeps a group until it is acknowledged: when the connection is lost, it looks up the address again and resends.
The puller hands over each (identity, sequence) once.

    push(group) ──> Pusher ──> _Link of one receiver ──> sockets.ClientSession: one connection
                                     │                        │ lost
                                     └── looks up the address, makes the next session, resends

Invariants of the sending end
    keep-until-ack  A group stays in ``_pending`` of its link until a PushAck or PushNack names its
                    sequence, or its push is cancelled. A lost connection therefore loses no group.
    one-session     A session belongs to one address and never reconnects. The receiver may have been
                    restarted at another address; only a new look-up finds it.
    own-identity    Each Pusher has a new random identity, so a receiver never takes the sequences of
                    a restarted worker for ones that it has stored already.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from realsys.cluster.aio import run_beside
from realsys.cluster.failpoint import failpoint
from realsys.cluster.lease import CheckAlive, unleased
from realsys.cluster.stream import codec as protocol
from realsys.cluster.stream import sockets
from realsys.cluster.stream.codec import Buffer, Push, PushAck, PushNack, Slabs, decode_group, decode_with, encode_group
from realsys.cluster.stream.security import CurveKeys
from realsys.errors import DecodeError, RealsysError, StreamError, WaitTimeout
from realsys.types import Group

log = logging.getLogger(__name__)

#: between attempts to find and reach a puller that is gone; doubles from the first to the last
FIRST_DELAY_S = 0.05
LAST_DELAY_S = 1.0
#: after which a group without an acknowledgement makes the link look up its receiver again
MOVED_S = 5.0


@dataclass(frozen=True, slots=True)
class PushLimits:
    """Bounds of a Pusher.

    max_in_flight      unacknowledged groups, over all receivers; ``push`` waits for a free slot
    push_timeout_s     from the call of ``push`` to the acknowledgement
    connect_timeout_s  from connecting to the end of the handshake, per attempt
    """

    max_in_flight: int = 8
    push_timeout_s: float = 300.0
    connect_timeout_s: float = 10.0


class Pusher:
    """Pushes groups to ``receivers`` in turn. Use it on one event loop.

    ``resolve(dp)`` returns the address of DP head ``dp``; it runs in a thread and may block. A
    RealsysError from it means that the head has no address yet.
    """

    def __init__(
        self,
        resolve: Callable[[int], str],
        receivers: Sequence[int],
        identity: str,
        *,
        keys: CurveKeys | None = None,
        limits: PushLimits = PushLimits(),
        check_alive: CheckAlive = unleased,
    ) -> None:
        """``check_alive`` runs before a group is sent; an exception of it ends the push."""
        if not receivers:
            raise ValueError(f"{identity}: receivers is empty: a pusher needs at least one")
        self.identity = identity
        self.bad_messages = 0  # messages of pullers that did not decode
        self._timeout_s = limits.push_timeout_s
        self._context: sockets.ZContext = zmq.Context()
        connector = _Connector(resolve, self._context, keys, limits.connect_timeout_s, check_alive, self._drop)
        # own-identity: without the random part, a worker that is restarted under its old name would
        # start again at sequence 0, and the receiver would drop its groups as duplicates.
        session = f"{identity}#{secrets.token_hex(6)}"
        self._links = [_Link(dp, f"{session}>{dp}", connector) for dp in receivers]
        self._turn = 0
        self._slabs = Slabs(keep=limits.max_in_flight)
        self._slots = asyncio.Semaphore(limits.max_in_flight)
        self._closed = False

    async def push(self, group: Group) -> None:
        """Send ``group`` and return when a receiver has stored it.

        Raises StreamError if the group cannot be encoded or the puller refuses it, and WaitTimeout
        if no acknowledgement arrives in time. The group may have been stored all the same: ticket
        and attempt identify the copies.
        """
        if self._closed:
            raise StreamError(f"{self.identity}: push after close: create a new Pusher")
        what = f"group {group.ticket.ticket_id}"
        link: _Link | None = None
        try:
            async with asyncio.timeout(self._timeout_s), self._slots:
                link = self._links[self._turn % len(self._links)]
                self._turn += 1
                frames = encode_group(group, self._slabs)
                await link.deliver(frames, what)
                # Only now: libzmq sends from this memory without a copy, and a push that failed may
                # still be in its queue. Such a slab is left to the garbage collector.
                if isinstance(frames[1], memoryview):
                    self._slabs.release(frames[1])
        except TimeoutError:
            no_slot = "a free slot (all groups in flight are unacknowledged)"
            waited_for = link.situation() if link else no_slot
            raise WaitTimeout(
                f"{self.identity}: {what} not acknowledged in {self._timeout_s:g} s by {waited_for}"
            ) from None

    async def close(self) -> None:
        """Stop. Pushes that still wait raise StreamError."""
        if self._closed:
            return
        self._closed = True
        for link in self._links:
            await link.close()
        self._context.term()  # after the links: it waits for every socket of the context

    def _drop(self, puller: str, err: DecodeError) -> None:
        self.bad_messages += 1
        if sockets.worth_logging(self.bad_messages):
            source = f"dropped message {self.bad_messages} of {puller}"
            log.warning("%s: %s: %s", self.identity, source, err)


@dataclass(frozen=True, slots=True)
class _Connector:
    """The collaborators that all links of a pusher share."""

    resolve: Callable[[int], str]
    context: sockets.ZContext
    keys: CurveKeys | None
    connect_timeout_s: float
    check_alive: CheckAlive
    on_bad_message: Callable[[str, DecodeError], None]


@dataclass(slots=True)
class _Pending:
    """A group that is not acknowledged yet."""

    frames: list[bytes | memoryview]
    what: str
    stored: asyncio.Future[None]


class _Link:
    """The path to one receiver, over any number of sessions.

    Consumes groups from ``deliver``. Waits for an address, then for a handshake, then for the loss
    of the connection. Acknowledgements unblock ``deliver``. Produces Push messages, in sequence,
    only while the connection is up.
    """

    def __init__(self, dp: int, identity: str, connector: _Connector) -> None:
        self._dp = dp
        self._identity = identity
        self._connector = connector
        self._pending: dict[int, _Pending] = {}  # sequence -> group, ascending
        self._next = 0
        self._session: sockets.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._address = ""
        self._problem = "no address yet"

    async def deliver(self, frames: list[bytes | memoryview], what: str) -> None:
        """Send ``frames`` and return when the receiver has stored them; StreamError if it refuses."""
        if self._failure is not None:
            failed = f"link to puller {self._dp} failed: {self._failure}"
            raise StreamError(f"{self._identity}: {failed}") from self._failure
        # Started by the first group: a pusher that sends nothing makes no connection.
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"push-link-{self._dp}")
            self._task.add_done_callback(self._ended)
        sequence = self._next
        self._next += 1
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending[sequence] = _Pending(frames, what, stored)
        try:
            # If no session is up, ``_on_up`` of the next one sends the group.
            if self._session is not None and self._session.up:
                self._send(self._session, sequence)
            await stored
        finally:
            # Also if the push is cancelled: a group whose caller has left must not be resent, and the
            # receiver learns from the floor of the next Push that this sequence is cancelled.
            self._pending.pop(sequence, None)

    def situation(self) -> str:
        """Describe receiver, address and problem, for an error message."""
        return f"puller {self._dp} at {self._address or 'unknown address'} ({self._problem or 'connected'})"

    async def close(self) -> None:
        """Stop; pushes that still wait raise StreamError."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])  # ``_ended`` has passed its error, if any, to the pushes

    async def _run(self) -> None:
        delay = FIRST_DELAY_S
        while True:
            if await self._connect_once():
                delay = FIRST_DELAY_S
            await asyncio.sleep(delay)
            delay = min(2 * delay, LAST_DELAY_S)

    async def _connect_once(self) -> bool:
        """Connect and stay until the connection is lost; return True if it had come up."""
        connector = self._connector
        try:
            # Looked up for every session: a restarted receiver registers a new address.
            self._address = await asyncio.to_thread(connector.resolve, self._dp)
            session = sockets.ClientSession(
                connector.context, self._address, connector.keys, self._on_up, self._on_message
            )
        except RealsysError as err:
            self._problem = str(err)
            return False
        self._session = session
        try:
            came_up = await run_beside(session.outlive(connector.connect_timeout_s), self._leave_if_moved(session))
        finally:
            # Before the socket closes: ``deliver`` must not send on a closed socket.
            self._session = None
            session.close()
        self._problem = session.problem
        log.warning("%s: %s", self._identity, self.situation())
        return came_up

    async def _leave_if_moved(self, session: sockets.ClientSession) -> None:
        """End a session whose receiver has another address now.

        A look-up may return the address of a receiver that has died, until its lease lapses. If another
        process has got its port, the session stands, but nothing there acknowledges a group.
        """
        oldest = None
        while True:
            await asyncio.sleep(MOVED_S)
            before, oldest = oldest, next(iter(self._pending), None)
            if oldest is None or oldest != before:
                continue
            with contextlib.suppress(RealsysError):  # no address at the moment: the receiver is being restarted
                if await asyncio.to_thread(self._connector.resolve, self._dp) != self._address:
                    session.lose()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Fail every waiting push: the task only ends if the pusher closes or a defect stops it."""
        error = None if task.cancelled() else task.exception()
        self._failure = error or StreamError("the pusher was closed")
        for pending in self._pending.values():
            if not pending.stored.done():
                failure = StreamError(f"{self._identity}: {pending.what}: {self._failure}")
                failure.__cause__ = error
                pending.stored.set_exception(failure)

    def _on_up(self, session: sockets.ClientSession) -> None:
        # Everything unacknowledged, in sequence: nothing tells how much the old connection delivered.
        # The receiver acknowledges the groups that it has stored already, and stores the others.
        self._problem = ""
        for sequence in self._pending:
            self._send(session, sequence)

    def _send(self, session: sockets.ClientSession, sequence: int) -> None:
        # The floor is the oldest pending sequence. The receiver discards all outcomes below it, so its
        # memory stays bounded by the groups in flight.
        header = Push(self._identity, sequence, next(iter(self._pending)))
        frames = [msgspec.msgpack.encode(header), *self._pending[sequence].frames]
        fault = failpoint("push.send")
        # Directly before the send: a process that slept past its lease must not push.
        self._connector.check_alive()
        match fault:
            case "drop":
                session.lose()  # TCP loses a message only together with its connection
                return
            case "duplicate":
                session.send(frames)
            case "garbage":
                frames[-1] = bytes(7)
        session.send(frames)

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        fault = failpoint("push.ack")
        try:
            data: Buffer = b"\xc1" if fault == "garbage" else frames[0]
            acknowledgement = decode_with(protocol.TO_PUSHER, data, "acknowledgement")
        except DecodeError as err:
            self._connector.on_bad_message(f"puller {self._dp} at {self._address}", err)
            return
        if fault == "drop" and self._session is not None:
            self._session.lose()
            return
        self._settle(acknowledgement)
        if fault == "duplicate":
            self._settle(acknowledgement)

    def _settle(self, acknowledgement: PushAck | PushNack) -> None:
        if isinstance(acknowledgement, PushAck):
            sequences = acknowledgement.sequences
        else:
            sequences = [acknowledgement.sequence]
        for sequence in sequences:
            pending = self._pending.get(sequence)
            if pending is None or pending.stored.done():
                continue  # acknowledged twice (after a resend), or the push was cancelled
            if isinstance(acknowledgement, PushAck):
                pending.stored.set_result(None)
            else:
                puller = f"puller {self._dp} at {self._address}"
                refusal = f"{puller} refused {pending.what}: {acknowledgement.reason}"
                pending.stored.set_exception(StreamError(f"{self._identity}: {refusal}"))


# ---- puller
#
# Invariants of the receiving end
#     store-once       A sequence of an identity is handed to ``on_group`` at most once. A resent one gets
#                      the same outcome again, because its first acknowledgement may be lost.
#     store-then-ack   A PushAck leaves after ``on_group`` has returned. The sender discards the group then.
#     bounded-memory   Outcomes below a sender's floor are discarded, and so are the senders that have been
#                      silent longest.


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
                    frames = sockets.receive_frames(self.socket)
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
            sockets.send_frames(self.socket, [route, msgspec.msgpack.encode(acknowledgement)])
        except zmq.ZMQError as err:
            if err.errno != zmq.EHOSTUNREACH:
                raise
            # The sender is gone or reconnecting. If it resends the group, it gets the outcome then.
