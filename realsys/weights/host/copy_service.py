"""Service of a GenerationServer that gives its host's copies to other hosts (``weights.storage_readers``)."""

from __future__ import annotations

from collections.abc import Sequence

from realsys.cluster.http_server import HttpServer
from realsys.cluster.lease import CheckAlive
from realsys.config.schema import Config
from realsys.weights.base import WeightReader
from realsys.weights.host.host_reader import HostReader
from realsys.weights.host.peers import copy_app


class CopyService:
    """Runs if ``weights.storage_readers`` is set and the transport's reader has copies. ``url`` is "" otherwise."""

    def __init__(self, reader: WeightReader, config: Config, token: str | None, check_alive: CheckAlive) -> None:
        self.url = ""
        self._reader = reader if config.weights.storage_readers and isinstance(reader, HostReader) else None
        if self._reader is not None:
            self._reader.token = token
            app = copy_app(self._reader.copies, token=token, check_alive=check_alive)
            # In a thread of its own: a transfer must not delay the answers of the engine's service.
            self._http = HttpServer(app, config.cluster.host)
            self._http.start(config.cluster.connect_timeout_s)
            self.url = self._http.url

    def offer(self, locator: str, sources: Sequence[str]) -> None:
        """Read the version ``locator`` from these services, if it is staged next."""
        if self._reader is not None:
            self._reader.offer(locator, sources)

    def close(self) -> None:
        if self._reader is not None:
            self._http.close()
