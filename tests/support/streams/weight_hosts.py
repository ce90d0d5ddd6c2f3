"""Hosts of a trial, each with its memory, a server, and the service of its copies over real HTTP."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

from realsys.cluster.http_server import HttpServer
from realsys.weights.host_reader import HostReader, copy_app
from tests.support.streams.weight_versions import DiskVersions

TOKEN = "secret"


class WeightHosts:
    """Maker of hosts. ``stack`` closes them."""

    def __init__(self, root: Path, stack: ExitStack, versions: DiskVersions) -> None:
        self._root, self._stack, self.versions = root, stack, versions

    def host(self, name: str) -> tuple[HostReader, HttpServer]:
        memory = self._root / name
        memory.mkdir()
        reader = self._stack.enter_context(closing(self.versions.server([memory], token=TOKEN)))
        http = HttpServer(copy_app(reader.copies, token=TOKEN))
        http.start()
        self._stack.callback(http.close)
        return reader, http

    def stage(self, reader: HostReader, version: int, *sources: str) -> tuple[int, int]:
        """Stage a version and check its tensors; returns the bytes from storage and from other hosts."""
        path = str(self.versions.paths[version])
        reader.offer(path, sources)
        staged = reader.stage(path, version)
        self.versions.check(version, staged.tensors)
        staged.release()
        return staged.counts["bytes_read"], staged.counts["bytes_fetched"]
