"""The worker's end of the request-reply stream. It also serves the puller of a DP head.

    master ──Request──>  I/O thread  ──> next_request()  ──> a handler, in the worker's main thread
                             │       ──> next_background() ──> a handler, in a thread of the worker
           <──Reply────      ^       <── reply(), reply_error(), notify() from any thread
    pushers ──groups──>      │
                          GroupIntake.store() stores them; the Struct it returns becomes a notice

One thread owns every socket (``worker_io``). Other threads only touch a queue and the outbox.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from realsys.cluster.fence import CheckAlive, unleased
from realsys.errors import StreamError, WaitTimeout
from realsys.stream.codec import encode_message
from realsys.stream.puller import PullerStats
from realsys.stream.security import CurveKeys
from realsys.stream.wire import Failure
from realsys.stream.worker_io import GroupIntake, Outgoing, Request, WorkerIdentity, WorkerIO

log = logging.getLogger(__name__)

#: bound on the wait for the I/O thread to end: it stores at most one group and closes its sockets
IO_THREAD_S = 10.0


class WorkerEndpoint:
    """The connection of worker ``index`` to the master. Creating it starts its I/O thread.

    ``incarnation`` distinguishes a restarted worker from its predecessor. ``groups`` hands over a
    puller, which the I/O thread then owns. ``check_alive`` runs before anything is received or sent.
    An exception in the I/O thread ends it through ``threading.excepthook``; later calls of
    ``next_request``, ``reply`` and ``notify`` raise StreamError.
    """

    kind = "model_worker"  # kind of this process in messages

    def __init__(
        self,
        index: int,
        master_address: str,
        groups: GroupIntake | None = None,
        *,
        incarnation: str | None = None,
        keys: CurveKeys | None = None,
        check_alive: CheckAlive = unleased,
    ) -> None:
        # The master compares incarnations as strings and refuses the older, so they begin with the time.
        self.incarnation = incarnation or f"{time.time_ns()}-{secrets.token_hex(4)}"
        self._me = WorkerIdentity(index, self.incarnation, master_address, check_alive, self.kind)
        self.index = index
        self.name = self._me.name
        self._puller = groups.puller if groups is not None else None
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._background: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._io = WorkerIO(self._me, keys, groups, self._requests, self._background)
        # A daemon, so that a thread that blocks in ``store`` cannot keep the process alive.
        self._thread = threading.Thread(target=self._io.run, name=f"{self.name}-io", daemon=True)
        self._thread.start()

    def counters(self) -> dict[str, int]:
        """Return how many messages, groups and peers were refused since the start, by reason."""
        stats = PullerStats() if self._puller is None else self._puller.stats
        return {
            "malformed": stats.malformed,
            "refused_groups": stats.refused,
            "rejected_peers": stats.rejected,
            "bad_messages": self._io.bad_messages,
        }

    def answer_urgent(self, handler: str, kind: type[msgspec.Struct], answer: Callable[[Any], msgspec.Struct]) -> None:
        """Answer requests ``handler`` in the I/O thread, also while the main thread serves another request.

        ``answer`` must be short. An exception in it ends the I/O thread.
        """
        self._io.urgent[handler] = (kind, answer)

    def wait_connected(self, timeout_s: float) -> None:
        """Wait until the master has welcomed this worker; WaitTimeout names the master's address."""
        if not self._io.connected.wait(timeout_s):
            master = f"the master at {self._me.master_address}"
            raise WaitTimeout(f"{self.name}: no welcome from {master} in {timeout_s:g} s ({self._io.problem})")

    def next_request(self, timeout_s: float) -> Request | None:
        """Return the next call, in the order the master made them; None after ``timeout_s``.

        Raises StreamError if the endpoint has ended.
        """
        return self._next(self._requests, timeout_s)

    def serve_in_background(self, *handlers: str) -> None:
        """From now on hand out the requests of ``handlers`` through ``next_background`` only.

        They do not wait for the main thread, and keep their order among themselves.
        """
        self._io.in_background |= set(handlers)

    def next_background(self, timeout_s: float) -> Request | None:
        """Return the next call that ``serve_in_background`` names; otherwise as ``next_request``."""
        return self._next(self._background, timeout_s)

    def _next(self, requests: queue.SimpleQueue[Request | None], timeout_s: float) -> Request | None:
        try:
            request = requests.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if request is None:
            requests.put(None)  # the mark of the end stays, for the next caller
            raise self._ended_error("no more requests")
        return request

    def reply(self, request: Request, payload: msgspec.Struct) -> None:
        """Send ``payload`` as the result of ``request``."""
        self._post(Outgoing(encode_message(payload), request=request.number))

    def reply_error(self, request: Request, exc: BaseException) -> None:
        """Report that handling ``request`` raised ``exc``; the master's call raises RemoteError."""
        text = "".join(traceback.format_exception(exc))
        failure = Failure(type(exc).__name__, str(exc), text)
        self._post(Outgoing(b"", request=request.number, failure=failure))

    def notify(self, handler: str, payload: msgspec.Struct) -> None:
        """Send a message that is no reply. The master receives it once, in order with the replies."""
        self._post(Outgoing(encode_message(payload), handler=handler))

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop, after waiting up to ``timeout_s`` for a connected master to acknowledge everything.

        An I/O thread that does not end (``store`` blocks, for example on a dead disk) is logged and
        left, with its sockets, to the end of the process. It must not hide the error for which the
        caller closes.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError(f"{self.name}: close() was called in the I/O thread: call it in another thread")
        if self._thread.is_alive() and not self._io.outbox.idle.wait(timeout_s):
            log.warning("%s: closing with replies or notices the master has not acknowledged", self.name)
        self._io.outbox.stop()
        self._thread.join(IO_THREAD_S)
        if self._thread.is_alive():
            # term() would wait for the sockets of the blocked thread without end.
            log.error("%s: its I/O thread did not end within %g s; it is left behind", self.name, IO_THREAD_S)
            return
        self._io.close()

    def _post(self, outgoing: Outgoing) -> None:
        if not self._io.outbox.post(outgoing):
            raise self._ended_error("cannot send")

    def _ended_error(self, what: str) -> StreamError:
        failure = self._io.failure
        cause = f"its I/O thread died: {failure!r}" if failure else "the endpoint was closed"
        error = StreamError(f"{self.name}: {what}: {cause}")
        error.__cause__ = failure
        return error
