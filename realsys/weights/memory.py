"""The transport ``memory``: a version stays in the memory of the ranks' hosts, and servers fetch it from there.

    rank    share ──> file in shared memory of its host <── link ── version folder (manifest, links: no weights)
                                │
    server  on this host: opens the link      on another host: Range requests to the rank ──> shared copy of its host

Everything else is as in ``disk``: manifest, deltas, verification, repair, and hosts that pass a version on. A version
ends with its trainer: the next one publishes the weights of its checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from realsys.cluster.commit_folder import TEMPORARY
from realsys.config.schema import Config
from realsys.weights.byte_ranges import Handler, OpenFile, range_app
from realsys.weights.contract import Share, WeightWriter, WriterParts
from realsys.weights.disk.manifest import VERSION, DiskPlan, ShardInfo
from realsys.weights.disk.transport import DiskTransport
from realsys.weights.host_places import Membership, choose, folder_name, places

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
PATH = "/shard"


class MemoryTransport(DiskTransport):
    """Versions as folders of links to files in the memory of the ranks' hosts."""

    def writer(self, parts: WriterParts) -> WeightWriter:
        return MemoryWriter(self.files(parts), parts, self.config)

    def files(self, parts: WriterParts) -> WeightWriter:
        """Return the writer of a rank's file."""
        return super().writer(parts)


class MemoryWriter:
    """Writer of one rank's file in shared memory, and its service for other hosts. Reports like ``DiskWriter``."""

    def __init__(self, files: WeightWriter, parts: WriterParts, config: Config) -> None:
        self._files = files
        self._parts = parts
        self._host = config.cluster.host
        self._versions = config.weights.keep_versions + 1  # those that are kept, and the one that is written
        self._home: Path | None = None  # folder of this rank's files
        self.url = ""

    def write(self, share: Share, tensors: Mapping[str, torch.Tensor]) -> list[ShardInfo]:
        """Write the file, and a link to it in the plan's folder. Raises WeightsError, which names path and cause."""
        if not tensors:
            return []
        folder = Path(msgspec.convert(share.plan, DiskPlan).directory)
        whole = getattr(tensors, "frozen", tensors)  # of AdaptedTensors: the size is known without merging
        own = self._started(sum(tensor.nbytes for tensor in whole.values()), share.version)
        own = own / folder.parent.name / folder.name.removesuffix(TEMPORARY)
        own.mkdir(parents=True, exist_ok=True)
        for older in own.parent.iterdir():  # versions that the publisher has deleted, or that came to nothing
            if older != own and not (folder.parent / older.name).exists():
                shutil.rmtree(older, ignore_errors=True)
        plan = DiskPlan(str(own), msgspec.convert(share.plan, DiskPlan).base)
        shards: list[ShardInfo] = self._files.write(replace(share, plan=plan), tensors)
        for shard in shards:
            shard.rank = self.url
            (folder / shard.file).symlink_to(own / shard.file)
        return shards

    def _started(self, size: int, version: int) -> Path:
        """Return the folder of this rank's files. The first call makes it, and starts the service."""
        if self._home is None:
            from realsys.cluster.http_server import HttpServer

            where = places()
            place = choose(where, self._versions * size, version)
            if place != where[0]:
                problem = f"{where[0]} has no room for {self._versions} versions of {size / 1e9:.2f} GB"
                log.warning("%s: they are in %s", problem, place)
            self._members = Membership.enter(place / folder_name(self._parts.trial))
            home = self._members.folder / f"rank-{self._parts.worker}"
            service = range_app(
                PATH,
                lambda wanted: self.opened(home, wanted),
                token=self._parts.token,
                check_alive=self._parts.check_alive,
                more=self.routes(home),
            )
            self._http = HttpServer(service, self._host)
            self._http.start()
            self._home, self.url = home, self._http.url + PATH
        return self._home

    def routes(self, home: Path) -> Mapping[str, Handler]:
        """Return what the service does besides, by path. ``home``: folder of the files."""
        return {}

    @staticmethod
    def opened(home: Path, wanted: Mapping[str, str]) -> OpenFile | None:
        """Open a file below ``home``. A version has it under the same name, or with the suffix ``.part``."""
        role, folder, file = (wanted.get(name, "") for name in ("role", "folder", "file"))
        if not VERSION.pattern.fullmatch(folder) or Path(role).name != role or Path(file).name != file:
            return None
        with contextlib.suppress(OSError):
            return OpenFile(os.open(home / role / folder / f"{Path(file).stem}.safetensors", os.O_RDONLY))
        return None
