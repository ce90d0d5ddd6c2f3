"""`realsys view`: the page of a trial on a loopback port, whether the trial runs or has ended."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from starlette.applications import Starlette

from realsys.cluster.http_server import Admission, Guard, HttpServer
from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError, RealsysError
from realsys.view.app import OPEN, SECRET, Live, routes


class ViewServer:
    """Server of one trial on 127.0.0.1, in a thread. ``address`` has its key in the fragment.

    Other users of the machine can connect to the port, so every route that shows the trial needs the key.
    """

    def __init__(self, paths: TrialPaths, live: Live, is_running: Callable[[], bool], port: int = 0) -> None:
        """Raises ConfigError if the port is taken."""
        self.key = secrets.token_urlsafe(16)
        app = Guard(
            Starlette(routes=routes(paths, live, is_running)),
            Admission(self.key, (*OPEN, *SECRET)),
            max_body=0,
            error=lambda message: {"error": message},
        )
        try:
            self._server = HttpServer(app, "127.0.0.1", port)
        except RealsysError as error:
            raise ConfigError("--port", port, str(error)) from None
        self.address = f"{self._server.url}/#key={self.key}"

    def start(self) -> None:
        """Serve in a thread. Raises WaitTimeout if it does not start."""
        self._server.start()

    def close(self) -> None:
        """Stop. Raises WaitTimeout if that takes too long."""
        self._server.close()


def serve_view(
    paths: TrialPaths,
    live: Live,
    is_running: Callable[[], bool],
    port: int = 0,
    say: Callable[[str], None] = print,
    *,
    about: str = "",
) -> None:
    """Serve until Ctrl-C. ``say`` gets ``about`` and the address, once it can be opened. Raises ConfigError."""
    server = ViewServer(paths, live, is_running, port)
    server.start()
    try:
        say(f"{about}\n{server.address}" if about else server.address)
        threading.Event().wait()
    except KeyboardInterrupt:
        say("")
    finally:
        server.close()
