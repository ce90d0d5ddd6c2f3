"""Publication of a weight version: every rank writes, the master commits, and only then the name store tells."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from realsys.cluster.failpoint import reach
from realsys.cluster.fence import CheckAlive, unleased
from realsys.cluster.name_store import NameStore
from realsys.types import PublishedVersion, SaveWeightsReply, SaveWeightsRequest
from realsys.weights import manifest
from realsys.weights.files import materialise

log = logging.getLogger(__name__)

SaveEverywhere = Callable[[SaveWeightsRequest], Awaitable[list[SaveWeightsReply]]]


class Publisher:
    """Owns the version counter of one role. Versions only grow, from the first one that is published here."""

    def __init__(
        self,
        *,
        store: NameStore,
        key: str,
        root: Path,
        model_dir: Path,
        incarnation: str,
        keep: int,
        save: SaveEverywhere,
        role: str = "actor",
        check_alive: CheckAlive = unleased,
    ) -> None:
        """``check_alive``: asked before anything becomes visible; ``publish`` raises what it raises."""
        self._check_alive = check_alive
        self._store, self._key, self._root, self._model_dir = store, key, root, model_dir
        self._incarnation, self._keep, self._save, self._role = incarnation, keep, save, role
        self.newest: PublishedVersion | None = None

    async def publish(self, version: int, step: int) -> dict[str, float]:
        """Write and publish ``version``; returns seconds spent in ``save`` and ``publish``.

        On any error nothing is published and the last version stays what it was. Versions of earlier incarnations go
        like older ones: the newest of them stays for as long as a server may be in the middle of reading it.
        """
        if self.newest is not None and version <= self.newest.version:
            raise ValueError(f"version {version} does not follow {self.newest.version}")
        start = time.perf_counter()
        tmp = await asyncio.to_thread(manifest.prepare, self._root, version, self._incarnation)
        base = "" if self.newest is None else Path(self.newest.path).name
        replies = await self._save(SaveWeightsRequest(self._role, version, str(tmp), base))
        saved = time.perf_counter()
        shards = [shard for reply in replies for shard in reply.shards]
        reach("weights.manifest")
        self._check_alive()
        final = await asyncio.to_thread(
            manifest.commit,
            tmp,
            version=version,
            incarnation=self._incarnation,
            step=step,
            shards=shards,
            model_dir=self._model_dir,
        )
        reach("weights.publish", final)
        self._check_alive()
        published = PublishedVersion(version, self._incarnation, str(final), step)
        value = msgspec.json.encode(published).decode()
        await asyncio.to_thread(self._store.add, self._key, value, replace=True)
        self.newest = published
        gone = await asyncio.to_thread(manifest.prune, self._root, keep=self._keep, in_use=[final])
        size = sum(manifest.tensor_bytes(info) for shard in shards for info in shard.tensors.values())
        log.info(
            "published version %d (%s), %.1f of %.1f MB written, pruned %d",
            version,
            final.name,
            sum(shard.size for shard in shards) / 1e6,
            size / 1e6,
            len(gone),
        )
        return {"save": saved - start, "publish": time.perf_counter() - saved}

    async def discard_unfinished(self) -> None:
        """What dead incarnations left half written or half removed goes; before the first publication."""
        self._check_alive()  # a successor may be writing
        for path in await asyncio.to_thread(manifest.discard_unfinished, self._root):
            log.info("removed %s, which was never completed", path)

    async def export(self, target: Path) -> None:
        """Write the newest version to ``target`` as a plain HF directory, whole or not at all."""
        assert self.newest is not None, "nothing was published yet"
        target.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(materialise, Path(self.newest.path), target, self.newest.version)
