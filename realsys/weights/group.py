"""The transport ``group``: ranks broadcast a version from their memory straight into the engines.

    rank    share ──> file in shared memory of its host <── /send <── server: senders
                          └── broadcast (inside/realsys_group) ──> ranks of SGLang or vLLM: check, load in place

Everything else is as in ``memory``. The next attempt after one that failed, and an engine in the server's own process,
read the version as ``memory`` does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from realsys.cluster.failpoint import failpoint
from realsys.cluster.http_client import CallFailed, HttpClient
from realsys.config.allocation import parse_allocation
from realsys.config.schema import Config
from realsys.errors import MALFORMED, ConfigError, WeightsError
from realsys.weights.byte_ranges import OpenFile
from realsys.weights.contract import ReaderParts, Share, WeightReader, WeightWriter, WriterParts
from realsys.weights.disk.manifest import ShardInfo, VersionManifest, load_manifest
from realsys.weights.host_copies import SharedCopies
from realsys.weights.host_reader import HostReader
from realsys.weights.memory import PATH, MemoryTransport, MemoryWriter

if TYPE_CHECKING:
    import torch
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)
SEND = "/send"
_OFFER_TIMEOUT_S = 10.0


class GroupTransport(MemoryTransport):
    """Versions in the memory of the ranks' hosts, which engines load by group."""

    def check(self) -> None:
        """Refuse what a group cannot have: deltas, stages of a server, and ranks that share a GPU with servers."""
        if self.config.weights.delta != "off":
            problem = "weights.transport=group sends whole tensors: set it to off, or weights.transport=memory"
            raise ConfigError("weights.delta", self.config.weights.delta, problem)
        allocation = parse_allocation(self.config.allocation)
        if allocation.inference.pipeline > 1:
            problem = "with weights.transport=group a server has no stages: use tensor parallelism, or memory"
            raise ConfigError("allocation", self.config.allocation, problem)
        if allocation.lent:
            problem = "with weights.transport=group ranks send what they have on their GPUs, which servers use in turn"
            raise ConfigError("allocation", self.config.allocation, f"{problem}: use weights.transport=memory")
        if self.config.cluster.share_gpus:
            problem = "a GPU cannot be in a group twice: use weights.transport=memory"
            raise ConfigError("cluster.share_gpus", True, problem)

    def writer(self, parts: WriterParts) -> WeightWriter:
        return GroupWriter(self.files(parts), parts, self.config)

    def reader(self, parts: ReaderParts) -> WeightReader:
        copies = SharedCopies(parts.trial, parts.model_dir, token=parts.token)
        return GroupReader(copies, parts.token, f"server-{parts.server}")


# ---- rank


class _Asked(msgspec.Struct):
    """Request for tensors of a file, by ``receivers`` ranks of an engine. ``parts``: first byte and size of each."""

    role: str
    folder: str
    file: str
    parts: list[tuple[int, int]]
    receivers: int
    server: str


class GroupWriter(MemoryWriter):
    """Writer of one rank's file, and sender of its bytes. A transfer has its own thread, group and open file."""

    def __init__(self, files: WeightWriter, parts: WriterParts, config: Config) -> None:
        super().__init__(files, parts, config)
        self._limit_s = config.manager.update_timeout_s

    def write(self, share: Share, tensors: Mapping[str, torch.Tensor]) -> list[ShardInfo]:
        from realsys.weights.inside.realsys_group import digest

        shards = super().write(share, tensors)
        for shard in shards:
            for name, info in shard.tensors.items():
                if len(info.pieces) == 1:  # a tensor with an adapter is merged on the server's host
                    info.digest = digest(_bytes_of(tensors[name]))
        return shards

    def routes(self, home: Path) -> dict[str, Any]:
        async def send(request: Request) -> Response:
            from starlette.responses import JSONResponse, PlainTextResponse

            try:
                asked = msgspec.json.decode(await request.body(), type=_Asked)
            except MALFORMED as error:
                return PlainTextResponse(str(error), 400)
            file = await asyncio.to_thread(self.opened, home, msgspec.structs.asdict(asked))
            if file is None:
                return PlainTextResponse("this rank does not have the file", 404)
            return JSONResponse(await asyncio.to_thread(self._offer, file, asked))

        return {SEND: send}

    def _offer(self, file: OpenFile, asked: _Asked) -> dict[str, Any]:
        """Start a sender. Returns where it waits."""
        import torch

        from realsys.weights.inside.realsys_group import Offer

        backend = "nccl" if torch.cuda.is_available() else "gloo"
        offer = Offer(urlsplit(self.url).hostname or "", 1 + asked.receivers, backend, self._limit_s)
        Thread(target=self._send, args=(offer, file, asked), name=f"send-{asked.server}", daemon=True).start()
        return offer.place

    def _send(self, offer: Any, file: OpenFile, asked: _Asked) -> None:
        import torch

        try:
            path, size = f"/proc/self/fd/{file.descriptor}", os.fstat(file.descriptor).st_size
            mapped = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            begin = time.perf_counter()
            offer.send(mapped, asked.parts, lambda: failpoint("weights.send"))
            seconds = time.perf_counter() - begin
            log.info("%s of %s is sent to %s in %.3f s", asked.file, asked.folder, asked.server, seconds)
        except (RuntimeError, OSError) as error:
            log.warning("%s of %s was not sent to %s: %s", asked.file, asked.folder, asked.server, str(error))
        finally:
            file.close()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# ---- server


@dataclass(frozen=True, slots=True)
class Senders:
    """The ranks that have a version in their memory.

    ranks  URL by folder and file, also of earlier versions whose tensors this one has
    held   names of tensors that the engine has as they are
    """

    manifest: VersionManifest
    ranks: Mapping[str, Mapping[str, str]]
    held: AbstractSet[str]
    directory: Path
    server: str
    token: str | None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors, by HF name."""
        return {name: tuple(info.shape) for name, info in self.manifest.tensors.items()}

    async def order(self, receivers: int, *, everything: bool) -> dict[str, Any]:
        """Make all ranks wait for ``receivers`` ranks of an engine. Returns what these must receive.

        ``everything``: also what the engine has. Raises WeightsError.
        """
        names: dict[tuple[str, str], list[str]] = {}
        for name, info in self.manifest.tensors.items():
            if everything or name not in self.held:
                [piece] = info.pieces
                names.setdefault((piece.folder or self.directory.name, piece.file), []).append(name)
        async with HttpClient(self.token) as http:
            calls = [self._sender(http, *place, mine, receivers) for place, mine in sorted(names.items())]
            return {"senders": list(await asyncio.gather(*calls))}

    async def _sender(
        self, http: HttpClient, folder: str, file: str, names: list[str], receivers: int
    ) -> dict[str, Any]:
        from realsys.weights.disk.dtypes import torch_name

        tensors = self.manifest.tensors
        names.sort(key=lambda name: tensors[name].pieces[0].start)
        parts = [(piece.start, piece.size) for name in names for piece in tensors[name].pieces]
        asked = _Asked(self.directory.parent.name, folder, file, parts, receivers, self.server)
        try:
            url = self.ranks[folder][file].removesuffix(PATH) + SEND
            place = msgspec.json.decode(await http.call(url, asked, _OFFER_TIMEOUT_S))
        except (CallFailed, *MALFORMED) as error:
            raise WeightsError(f"no rank sends {folder}/{file}: {error}") from error
        described = [(name, torch_name(one.dtype), one.shape, one.digest) for name in names if (one := tensors[name])]
        return {"place": place, "tensors": described}


class GroupReader(HostReader):
    """Names the senders of a version. After a failure, and for an engine in this process, it stages as ``memory``."""

    def __init__(self, copies: SharedCopies, token: str | None, server: str) -> None:
        super().__init__(copies)
        self._token = token
        self._server = server
        self._tried = ""  # version whose senders were named last

    def senders(self, locator: str, version: int, *, loaded: bool) -> Senders | None:
        """Return the senders of a version. ``loaded``: the engine has the one of the last call.

        None if it must be staged: the engine has all its tensors, a rank did not write one for a group, or it was
        tried before.
        """
        directory = Path(locator)
        tensors = (manifest := load_manifest(directory, version)).tensors
        if self._tried == locator or not all(info.digest for info in tensors.values()):
            return None
        has = self.checksums if loaded else {}
        held = {name for name, info in tensors.items() if has.get(name) == info.checksum}
        if len(held) == len(tensors):
            return None
        self.note(locator, manifest)
        self._tried = locator
        ranks = {need: load_manifest(directory.with_name(need)).ranks for need in manifest.needs}
        return Senders(manifest, {**ranks, directory.name: manifest.ranks}, held, directory, self._server, self._token)
