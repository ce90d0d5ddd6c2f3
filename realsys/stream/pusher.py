"""The sending end of the push-pull stream (see ``push_pull``)."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from realsys.cluster.failpoint import failpoint
from realsys.cluster.fence import CheckAlive, unleased
from realsys.errors import DecodeError, RealsysError, StreamError, WaitTimeout
from realsys.stream import sockets
from realsys.stream import wire as protocol
from realsys.stream.codec import Buffer, Slabs, decode_with, encode_group
from realsys.stream.security import CurveKeys
from realsys.stream.wire import Push, PushAck, PushNack
from realsys.types import Group

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.05  # between attempts to find and reach a puller that is gone; doubles up to the last
LAST_DELAY_S = 1.0


class Pusher:
    """Pushes groups to ``receivers`` in turn.

    ``resolve(dp)`` gives the address of DP head ``dp``; it runs in a thread and may take a moment. A RealsysError from
    it means "not there yet". To be used on one event loop.
    """

    def __init__(
        self,
        resolve: Callable[[int], str],
        receivers: Sequence[int],
        identity: str,
        *,
        keys: CurveKeys | None = None,
        max_in_flight: int = 8,
        push_timeout_s: float = 300.0,
        connect_timeout_s: float = 10.0,
        check_alive: CheckAlive = unleased,
    ) -> None:
        """``check_alive``: asked before a group is sent; what it raises ends the push."""
        if not receivers:
            raise ValueError(f"{identity}: a pusher needs at least one receiver")
        self.identity = identity
        self._timeout_s = push_timeout_s
        self._context: sockets.ZContext = zmq.Context()
        # a restarted worker must not be taken for a resending one, even if it is given the same name
        session = f"{identity}#{secrets.token_hex(6)}"
        self._links = [
            _Link(dp, f"{session}>{dp}", resolve, self._context, keys, connect_timeout_s, check_alive, self._dropped)
            for dp in receivers
        ]
        self.bad_messages = 0  # of pullers, that did not decode
        self._turn = 0
        self._slabs = Slabs(keep=max_in_flight)
        self._slots = asyncio.Semaphore(max_in_flight)
        self._closed = False

    async def push(self, group: Group) -> None:
        """Return when a receiver has stored ``group``.

        StreamError: it cannot be encoded, or the puller refused it. WaitTimeout: nobody acknowledged it in time (it may
        have been stored all the same; ticket and attempt tell the copies apart).
        """
        if self._closed:
            raise StreamError(f"{self.identity}: push after close")
        what = f"group {group.ticket.ticket_id}"
        link: _Link | None = None
        try:
            async with asyncio.timeout(self._timeout_s), self._slots:
                link = self._links[self._turn % len(self._links)]
                self._turn += 1
                frames = encode_group(group, self._slabs)
                await link.deliver(frames, what)
                if isinstance(frames[1], memoryview):  # acknowledged: the receiver has it, so libzmq is done with it
                    self._slabs.give_back(frames[1])
        except TimeoutError:
            waited = link.situation() if link else "a free slot (all groups in flight are unacknowledged)"
            raise WaitTimeout(
                f"{self.identity}: {what} not acknowledged in {self._timeout_s:g} s by {waited}"
            ) from None

    def _dropped(self, puller: str, err: DecodeError) -> None:
        self.bad_messages += 1
        if sockets.worth_logging(self.bad_messages):
            log.warning("%s: dropped message %d of %s: %s", self.identity, self.bad_messages, puller, err)

    async def close(self) -> None:
        """Stop. Pushes still waiting get a StreamError."""
        if self._closed:
            return
        self._closed = True
        for link in self._links:
            await link.close()
        self._context.term()


@dataclass(slots=True)
class _Pending:
    frames: list[bytes | memoryview]
    what: str
    stored: asyncio.Future[None]


class _Link:
    """The way to one receiver.

    Consumes groups from ``deliver``. Waits for an address, a handshake, and then for the connection to be lost;
    acknowledgements unblock ``deliver``. Produces Push messages, in sequence, only while the connection is up.
    """

    def __init__(
        self,
        dp: int,
        identity: str,
        resolve: Callable[[int], str],
        context: sockets.ZContext,
        keys: CurveKeys | None,
        connect_timeout_s: float,
        check_alive: CheckAlive,
        on_bad_message: Callable[[str, DecodeError], None],
    ) -> None:
        self._check_alive, self._on_bad_message = check_alive, on_bad_message
        self._dp, self._identity, self._resolve = dp, identity, resolve
        self._context, self._keys, self._connect_timeout_s = context, keys, connect_timeout_s
        self._pending: dict[int, _Pending] = {}  # by sequence, ascending
        self._next = 0
        self._session: _Session | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._address = ""
        self._problem = "no address yet"

    async def deliver(self, frames: list[bytes | memoryview], what: str) -> None:
        if self._failure is not None:
            raise StreamError(f"{self._identity}: link to puller {self._dp} failed: {self._failure}") from self._failure
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"push-link-{self._dp}")
            self._task.add_done_callback(self._ended)
        sequence = self._next
        self._next += 1
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending[sequence] = _Pending(frames, what, stored)
        try:
            if self._session is not None and self._session.up:
                self._send(self._session, sequence)
            await stored
        finally:
            self._pending.pop(sequence, None)

    def situation(self) -> str:
        """Receiver, address and what is wrong with it, for an error message."""
        return f"puller {self._dp} at {self._address or 'unknown address'} ({self._problem or 'connected'})"

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])  # its error, if any, went to the pushes

    async def _run(self) -> None:
        delay = FIRST_DELAY_S
        while True:
            try:
                self._address = await asyncio.to_thread(self._resolve, self._dp)
                session = _Session(self._context, self._address, self._keys, self._on_up, self._on_message)
            except RealsysError as err:
                self._problem = str(err)
            else:
                self._session = session
                try:
                    if await session.outlive(self._connect_timeout_s):
                        delay = FIRST_DELAY_S
                finally:
                    self._session = None
                    session.close()
                self._problem = session.problem
                log.warning("%s: %s", self._identity, self.situation())
            await asyncio.sleep(delay)
            delay = min(2 * delay, LAST_DELAY_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The link runs for ever: its end is the pusher's, or an error that every waiting push must see."""
        error = None if task.cancelled() else task.exception()
        self._failure = error or StreamError("the pusher was closed")
        for pending in self._pending.values():
            if not pending.stored.done():
                failure = StreamError(f"{self._identity}: {pending.what}: {self._failure}")
                failure.__cause__ = error
                pending.stored.set_exception(failure)

    def _on_up(self, session: _Session) -> None:
        self._problem = ""
        for sequence in self._pending:
            self._send(session, sequence)

    def _send(self, session: _Session, sequence: int) -> None:
        header = Push(self._identity, sequence, next(iter(self._pending)))
        frames = [msgspec.msgpack.encode(header), *self._pending[sequence].frames]
        fault = failpoint("push.send")
        self._check_alive()
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
            answer = decode_with(protocol.TO_PUSHER, data, "acknowledgement")
        except DecodeError as err:
            self._on_bad_message(f"puller {self._dp} at {self._address}", err)
            return
        if fault == "drop" and self._session is not None:
            self._session.lose()
            return
        self._acknowledged(answer)
        if fault == "duplicate":
            self._acknowledged(answer)

    def _acknowledged(self, answer: PushAck | PushNack) -> None:
        for sequence in answer.sequences if isinstance(answer, PushAck) else [answer.sequence]:
            pending = self._pending.get(sequence)
            if pending is None or pending.stored.done():
                continue  # acknowledged twice (after a resend), or given up
            if isinstance(answer, PushAck):
                pending.stored.set_result(None)
            else:
                puller = f"puller {self._dp} at {self._address}"
                refusal = f"{self._identity}: {puller} refused {pending.what}: {answer.reason}"
                pending.stored.set_exception(StreamError(refusal))


class _Session:
    """One connection to one address, from connecting to its loss. Never reconnects: the address may have changed."""

    def __init__(
        self,
        context: sockets.ZContext,
        address: str,
        keys: CurveKeys | None,
        on_up: Callable[[_Session], None],
        on_message: Callable[[list[zmq.Frame]], None],
    ) -> None:
        self.up = False
        self.problem = "connecting"
        self._on_up = on_up
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[bool] = loop.create_future()
        self._lost: asyncio.Future[None] = loop.create_future()  # an exception in it is a defect of ours
        self._dealer, self._monitor = sockets.connect_client(context, address, keys)
        self._reader = sockets.LoopReader(self._dealer, on_message, self._on_error)
        self._events = sockets.LoopReader(self._monitor, self._on_event, self._on_error)

    async def outlive(self, connect_timeout_s: float) -> bool:
        """Return when the connection is lost (True) or did not come about in time (False)."""
        try:
            # Not wait_for: in Python 3.11 it loses a cancellation that comes as the connection opens, and a pusher
            # that is closed right after its first push would wait for ever.
            async with asyncio.timeout(connect_timeout_s):
                opened = await self._opened
        except TimeoutError:
            self.problem = f"no connection within {connect_timeout_s:g} s"
            return False
        await self._lost  # done already if it did not open
        return opened

    def send(self, frames: list[bytes | memoryview]) -> None:
        self._dealer.send_multipart(frames, zmq.NOBLOCK, copy=False)
        self._reader.nudge()

    def lose(self) -> None:
        """As if the connection had been cut."""
        self.up, self.problem = False, "connection lost"
        if not self._lost.done():
            self._lost.set_result(None)

    def close(self) -> None:
        self.up = False
        self._reader.close()
        self._events.close()
        sockets.close_client(self._dealer, self._monitor)

    def _on_error(self, exc: BaseException) -> None:
        if not self._opened.done():
            self._opened.set_result(False)
        if not self._lost.done():
            self._lost.set_exception(exc)

    def _on_event(self, frames: list[zmq.Frame]) -> None:
        event = sockets.monitor_event(frames)
        if self._lost.done():
            return  # libzmq may reconnect by itself before this session is closed
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self.up = True
            self.problem = ""
            if not self._opened.done():
                self._opened.set_result(True)
            self._on_up(self)
            return
        if not self.problem or self.problem == "connecting":
            self.problem = sockets.describe_loss(event, was_up=self.up)
        self.up = False
        if not self._opened.done():
            self._opened.set_result(False)
        if not self._lost.done():
            self._lost.set_result(None)
