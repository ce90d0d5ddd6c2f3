"""HttpServer: uvicorn as every HTTP service of a trial runs it, on the caller's event loop or in its own thread.

bind (``url`` is right from then on) ──> serve ──> stop: replies that are due are finished, within a bound
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from realsys.cluster.http.http_guard import BoundedRequest
from realsys.cluster.network import advertised_host, bind_tcp, join_host_port, port_of
from realsys.errors import WaitTimeout

_FINISH_S = 3  # time for the replies that are due
_KEEP_ALIVE_S = 75  # longer than any client's, so that no request meets a connection that closes


class HttpServer:
    """One service. Either ``serve`` on a running event loop, or ``start`` and ``close`` for a thread."""

    def __init__(self, app: ASGIApp, host: str = "127.0.0.1", port: int = 0) -> None:
        """Bind ``host:port``; port 0 is any free one. Raises RealsysError if it is taken."""
        self._socket = bind_tcp(host, port)
        self.url = f"http://{join_host_port(advertised_host(host), port_of(self._socket))}"
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=BoundedRequest,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_FINISH_S,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def listen(self) -> None:
        """Queue connections from now on, so that a client may connect before ``serve`` has begun."""
        self._socket.listen()

    async def serve(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve on the running event loop until ``stop``. Calls ``on_ready`` once requests are accepted.

        Raises RuntimeError if uvicorn ends without ``stop``.
        """
        self._server.on_ready = on_ready
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()
        self._check_end()

    def stop(self) -> None:
        """Accept no more requests; end after the replies that are due."""
        self._server.should_exit = True

    def start(self, timeout_s: float = 30.0) -> None:
        """Serve in a thread. Returns when requests are accepted. Raises WaitTimeout if that takes too long."""
        ready = threading.Event()
        self._server.on_ready = ready.set
        self._thread.start()
        if not ready.wait(timeout_s):
            raise WaitTimeout(f"the HTTP server at {self.url} did not start within {timeout_s:g} s")

    def close(self, timeout_s: float = 8.0) -> None:
        """Stop, and wait for the thread. Raises WaitTimeout if that takes too long."""
        self.stop()
        self._thread.join(timeout_s)
        self._socket.close()
        if self._thread.is_alive():
            raise WaitTimeout(f"the HTTP server at {self.url} did not stop within {timeout_s:g} s")

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])
        self._check_end()

    def _check_end(self) -> None:
        if not self._server.should_exit:
            raise RuntimeError(f"the HTTP server at {self.url} ended although it was not stopped")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.on_ready: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers: the worker has its own."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready()
