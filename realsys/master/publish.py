"""Publication of a weight version: every rank writes, the master commits, and only then the name store tells."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from realsys.cluster.failpoint import reach
from realsys.cluster.fence import CheckAlive, unleased
from realsys.cluster.name_store import NameStore
from realsys.errors import NameStoreError, WeightsError
from realsys.master.disk import on_disk
from realsys.types import PublishedVersion, SaveWeightsReply, SaveWeightsRequest, ShardInfo
from realsys.weights import manifest
from realsys.weights.files import materialise, prove

log = logging.getLogger(__name__)

Result = TypeVar("Result")
MAX_MENDED = 3  # times that a version is written again before the disk is given up
RETRY_S = 0.5  # between two tries to reach the name store

SaveEverywhere = Callable[[SaveWeightsRequest], Awaitable[list[SaveWeightsReply]]]


async def tell(store: NameStore, key: str, value: str, patience_s: float, check_alive: CheckAlive = unleased) -> None:
    """Set ``key``; while the name store is away, try again for ``patience_s``: no longer than this process outlives it.

    Raises NameStoreError, and what ``check_alive`` raises.
    """
    deadline, away = time.monotonic() + patience_s, False
    while True:
        check_alive()
        try:
            return await asyncio.to_thread(store.add, key, value, replace=True)
        except NameStoreError as error:
            if time.monotonic() > deadline:
                raise
            if not away:
                log.warning("%s; trying again for %g s", error, patience_s)
            away = True
        await asyncio.sleep(RETRY_S)  # nothing tells when it is back


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
        timeout_s: float = 1800.0,
        patience_s: float = 0.0,
        check_alive: CheckAlive = unleased,
    ) -> None:
        """``timeout_s``: bound on what is done on the disk at a time; ``patience_s``: how long a name store may be
        away. ``check_alive``: asked before anything becomes visible; ``publish`` raises what it raises.
        """
        self._timeout_s, self._patience_s, self._check_alive = timeout_s, patience_s, check_alive
        self._store, self._key, self._root, self._model_dir = store, key, root, model_dir
        self._incarnation, self._keep, self._save, self._role = incarnation, keep, save, role
        self.newest: PublishedVersion | None = None
        self._named: set[Path] = set()  # folders whose problem has been logged
        self._mended, self._proved = 0, False  # how often the newest was written again; whether it is good

    async def publish(self, version: int, step: int) -> dict[str, float]:
        """Write and publish ``version``; returns seconds spent in ``save`` and ``publish``.

        On any error nothing is published and the last version stays what it was. Versions of earlier incarnations go
        like older ones: the newest of them stays for as long as a server may be in the middle of reading it.
        """
        if self.newest is not None and version <= self.newest.version:
            raise ValueError(f"version {version} does not follow {self.newest.version}")
        start = time.perf_counter()
        base = await self._on_disk(version, self._base)
        final, shards, saved = await self._write(version, step, base)
        reach("weights.publish", final)
        if problem := await self._on_disk(version, lambda: _problem(lambda: manifest.check_reference(final))):
            log.error("%s was damaged as it was written: %s; it is written again", final, problem)
            final, shards, saved = await self._write(version, step, "", replace=True)
        published = PublishedVersion(version, self._incarnation, str(final), step)
        value = msgspec.json.encode(published).decode()
        await tell(self._store, self._key, value, self._patience_s, self._check_alive)
        self.newest, self._mended, self._proved = published, 0, False
        removed = await self._on_disk(version, lambda: manifest.prune(self._root, keep=self._keep, in_use=[final]))
        self._name(removed.problems)
        size = sum(manifest.tensor_bytes(info) for shard in shards for info in shard.tensors.values())
        log.info(
            "published version %d (%s), %.1f of %.1f MB written, pruned %d",
            version,
            final.name,
            sum(shard.size for shard in shards) / 1e6,
            size / 1e6,
            len(removed.gone),
        )
        return {"save": saved - start, "publish": time.perf_counter() - saved}

    async def _write(
        self, version: int, step: int, base: str, *, replace: bool = False
    ) -> tuple[Path, list[ShardInfo], float]:
        """Has every rank write, and commits. Folder, what is in it, and when (perf_counter) the ranks were done."""
        tmp = await self._on_disk(version, lambda: manifest.prepare(self._root, version, self._incarnation))
        replies = await self._save(SaveWeightsRequest(self._role, version, str(tmp), base))
        saved = time.perf_counter()
        shards = [shard for reply in replies for shard in reply.shards]
        reach("weights.manifest")
        self._check_alive()
        final = await self._on_disk(
            version,
            lambda: manifest.commit(
                tmp,
                version=version,
                incarnation=self._incarnation,
                step=step,
                shards=shards,
                model_dir=self._model_dir,
                replace=replace,
            ),
        )
        return final, shards, saved

    async def mend(self, status: Mapping[str, Any]) -> None:
        """Where no server comes to serve the newest version (``status``: the manager's), prove it as a server would;
        if it is damaged, write it again in its place, for the servers to try again. To be called while the trainer
        has these weights: between two steps.

        Raises WeightsError when that does not help.
        """
        newest = self.newest
        if newest is None or self._proved or not unserved(status, newest.version):
            return
        problem = await self._problem_of_newest(newest)
        if not problem:
            self._proved = True  # the matter is with the servers
            return
        await self._rewrite(newest, problem)

    async def _problem_of_newest(self, newest: PublishedVersion) -> str:
        path = Path(newest.path)
        what = f"proving {path}"
        return await on_disk(what, self._timeout_s, lambda: _problem(lambda: prove(path, newest.version)))

    async def _rewrite(self, newest: PublishedVersion, problem: str) -> None:
        if self._mended == MAX_MENDED:
            raise WeightsError(f"{newest.path} was written {1 + MAX_MENDED} times, and is damaged: {problem}")
        log.error("%s is damaged: %s; it is written again", newest.path, problem)
        self._mended += 1
        await self._write(newest.version, newest.step, "", replace=True)

    async def discard_unfinished(self) -> None:
        """What dead incarnations left half written or half removed goes; before the first publication."""
        self._check_alive()  # a successor may be writing
        removed = await on_disk(
            f"tidying {self._root}", self._timeout_s, lambda: manifest.discard_unfinished(self._root)
        )
        for path in removed.gone:
            log.info("removed %s, which was never completed", path)
        self._name(removed.problems)

    def _base(self) -> str:
        """Folder name of the version that the next one may refer to; "" if there is none, or it is damaged: then all
        is written anew, and what is published next refers to nothing of it.
        """
        if self.newest is None:
            return ""
        path = Path(self.newest.path)
        if problem := _problem(lambda: manifest.check_reference(path)):
            log.error("%s is damaged: %s; the next version is written whole", path, problem)
            return ""
        return path.name

    def _name(self, problems: Mapping[Path, str]) -> None:
        """Each folder once."""
        for path in problems.keys() - self._named:
            log.error("%s: %s", path, problems[path])
        self._named = set(problems)

    async def export(self, target: Path) -> None:
        """Write the newest version to ``target`` as a plain HF directory, whole or not at all. Between two steps: one
        that is found damaged is written again first.
        """
        assert self.newest is not None, "nothing was published yet"
        self._check_alive()
        target.parent.mkdir(parents=True, exist_ok=True)
        newest = self.newest
        path, what = Path(newest.path), f"writing {target}"
        try:
            await on_disk(what, self._timeout_s, lambda: materialise(path, target, newest.version))
        except WeightsError:
            problem = await self._problem_of_newest(newest)
            if not problem:
                raise  # it is the target that cannot be written
            await self._rewrite(newest, problem)
            await on_disk(what, self._timeout_s, lambda: materialise(path, target, newest.version))

    async def _on_disk(self, version: int, work: Callable[[], Result]) -> Result:
        return await on_disk(f"publishing version {version} in {self._root}", self._timeout_s, work)


def unserved(status: Mapping[str, Any], version: int) -> bool:
    """Whether servers have tried to load the newest version, and none has it."""
    servers = status["servers"]
    tried = any(server["state"] == "quarantined" and server["error"] for server in servers)
    return tried and status["version"] == version and not any(server["version"] == version for server in servers)


def _problem(check: Callable[[], None]) -> str:
    """What is wrong with a version; "" if nothing is."""
    try:
        check()
    except WeightsError as error:
        return str(error)
    return ""
