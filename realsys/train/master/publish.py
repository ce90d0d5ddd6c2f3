"""Publication of a weight version: every rank writes, the master commits and sets the name-store key.

    begin ──> every rank copies its share to host memory            training waits
       └────> prepare ──> every rank writes its copy ──> commit ──> name-store key ──> prune
                                                                    while the next step trains

One publication runs at a time: ``begin`` waits for the one before. So versions are published in order,
and each one is published before the next is written. A version may be published later than its step is
reported as trained; the manager then grants fewer tickets (``admission``), never more.

The weight transport (``realsys.weights.contract``) does the writing. This module keeps the order of a
publication, the version counter, and the repair of damaged versions; it never reads a locator.

In a run without servers a version is a number: no rank copies or writes it. ``export`` has the newest one written,
from the weights that the ranks have until the next step trains.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from realsys.cluster.aio import on_disk
from realsys.cluster.commit_folder import Removed
from realsys.cluster.failpoint import failpoint
from realsys.cluster.lease import CheckAlive, unleased
from realsys.cluster.names.contract import NameStore
from realsys.config.allocation import ACTOR
from realsys.errors import NameStoreError, WeightsError
from realsys.model_calls import Empty
from realsys.observe.spans import span
from realsys.train.requests import CopyWeightsRequest, DigestWeightsRequest, SaveWeightsReply, SaveWeightsRequest
from realsys.types import PublishedVersion
from realsys.weights.contract import Committed, WeightPublisher

log = logging.getLogger(__name__)

Result = TypeVar("Result")
#: takes version, and the replies of all ranks that have written it
Saved = Callable[[int, list[SaveWeightsReply]], None]
MAX_REPAIRS = 3  # times that a version is written again before the run ends
RETRY_S = 0.5  # seconds between two tries to reach the name store


class WeightCalls(Protocol):
    """Calls of ``ModelWorkers`` that are used here: each goes to every rank of the actor."""

    def copy_weights(self, payload: CopyWeightsRequest) -> Awaitable[list[Empty]]: ...
    def save_weights(self, payload: SaveWeightsRequest) -> Awaitable[list[SaveWeightsReply]]: ...
    def digest_weights(self, payload: DigestWeightsRequest) -> Awaitable[list[SaveWeightsReply]]: ...


async def set_key(
    store: NameStore, key: str, value: str, retry_timeout_s: float, check_alive: CheckAlive = unleased
) -> None:
    """Set ``key``. If the name store does not answer, try again for ``retry_timeout_s``.

    Raises NameStoreError, and what ``check_alive`` raises.
    """
    # The monotonic clock: the wall clock may be set while the name store is away.
    deadline = time.monotonic() + retry_timeout_s
    away = False
    while True:
        check_alive()
        try:
            return await asyncio.to_thread(store.add, key, value, replace=True)
        except NameStoreError as error:
            if time.monotonic() > deadline:
                raise
            if not away:
                log.warning("%s; trying again for %g s", error, retry_timeout_s)
            away = True
        await asyncio.sleep(RETRY_S)  # a name store sends no event when it is back


@dataclass(frozen=True, slots=True)
class VersionKey:
    """The name-store key of the newest version.

    ``retry_timeout_s``: time for which the name store may fail to answer. ``check_alive``: called before
    each visible act.
    """

    store: NameStore
    key: str
    retry_timeout_s: float = 0.0
    check_alive: CheckAlive = unleased

    async def set(self, published: PublishedVersion) -> None:
        """Set the key. Raises NameStoreError, and whatever ``check_alive`` raises."""
        value = msgspec.json.encode(published).decode()
        await set_key(self.store, self.key, value, self.retry_timeout_s, self.check_alive)


class VersionsInUse:
    """Versions of this trainer that must not be pruned, because a server may stage or serve them (``fenced-weights``).

    Before the first call of ``keep`` these are all of them.
    """

    def __init__(self) -> None:
        self._locators: dict[int, str] = {}
        self._pinned: list[str] = []

    def add(self, version: int, locator: str) -> None:
        """Add a version that has just been published."""
        self._locators[version] = locator

    def keep(self, versions: Sequence[int], pins: Iterable[PublishedVersion] = ()) -> None:
        """Keep ``versions``, as the manager names them, and all newer ones: a server may begin those at any moment.

        ``pins``: versions, also of earlier trainers, that are kept whatever else is.
        """
        self._pinned = [held.locator for held in pins]
        newest = max(versions, default=-1)
        self._locators = {v: locator for v, locator in self._locators.items() if v in versions or v > newest}

    def locators(self) -> list[str]:
        """Return the locators of these versions, the pinned ones and then oldest first."""
        return [*self._pinned, *self._locators.values()]


class Publisher:
    """Owner of the actor's version counter. Versions only grow, from the first one published here."""

    def __init__(
        self,
        weights: WeightPublisher,
        workers: WeightCalls,
        key: VersionKey,
        *,
        incarnation: str,
        transport: str = "disk",
        timeout_s: float = 1800.0,
        served: bool = True,
        snapshots: bool = False,
    ) -> None:
        """``weights``: the transport's publisher; ``timeout_s``: bound on each of its calls.

        ``served``: False if the run has no servers. ``snapshots``: the run has some, and deletes versions only in
        ``keep_snapshots``: before, it does not know those of earlier trainers.
        """
        self._served = served
        self._has_snapshots = snapshots
        self._weights = weights
        self._workers = workers
        self._version_key = key
        self._incarnation = incarnation
        self._transport = transport
        self._timeout_s = timeout_s
        self.newest: PublishedVersion | None = None
        self._logged: set[str] = set()  # locators whose problem has been logged
        self._in_use = VersionsInUse()
        self._snapshots = 0  # versions that were written for single requests
        self._repairs = 0  # times that the newest version was written again
        self._verified = False  # the newest version has been read, and is good
        self._running: asyncio.Task[None] | None = None  # the last publication, until its end was seen
        self._begun = asyncio.Event()  # wakes ``watch``

    async def begin(self, version: int, step: int, saved: Saved | None = None) -> dict[str, float]:
        """Copy the weights on every rank, and publish them as ``version`` while training continues.

        ``saved`` gets the replies of the ranks when they have written. Returns the seconds in which the
        caller waited: in ``publish`` for the publication before, in ``save`` for the copies. Raises the
        error of the publication before. On any error nothing is published, and the last version stays
        the newest.
        """
        start = time.perf_counter()
        with span("settle", f"version/{version - 1}"):
            await self.finish()
        if self.newest is not None and version <= self.newest.version:
            raise ValueError(f"version {version} does not follow {self.newest.version}")
        waited = time.perf_counter()
        if self._served or saved is not None:
            with span("copy", f"version/{version}"):
                await self._workers.copy_weights(CopyWeightsRequest(ACTOR, version))
        work = self._spanned(version, step, saved)
        self._running = asyncio.create_task(work, name=f"publication of version {version}")
        self._begun.set()
        return {"save": time.perf_counter() - waited, "publish": waited - start}

    async def finish(self) -> None:
        """Return when no publication runs: then the newest version is that of the last ``begin``. Raises its error."""
        if self._running is not None:
            await asyncio.shield(self._running)  # a caller that is cancelled gives up its wait only
            self._running = None

    async def publish(self, version: int, step: int) -> None:
        """Publish the current weights as ``version``, and wait for the end."""
        await self.begin(version, step)
        await self.finish()

    async def watch(self) -> None:
        """Raise the error of a publication when it fails, until cancelled. Run it while the steps run."""
        while True:
            await self._begun.wait()
            self._begun.clear()
            if self._running is not None:
                await asyncio.shield(self._running)

    async def _spanned(self, version: int, step: int, saved: Saved | None) -> None:
        with span("publish", f"version/{version}"):
            if self._served:
                await self._write_next(version, step, saved)
                return
            if saved is not None:
                saved(version, await self._workers.digest_weights(DigestWeightsRequest(ACTOR, version)))
            published = PublishedVersion(version, self._incarnation, "", step, self._transport)
            await self._version_key.set(published)
            self.newest = published

    async def _write_next(self, version: int, step: int, saved: Saved | None = None) -> None:
        """Write a version, of which every rank has a copy, and make it the newest one; prune."""
        start = time.perf_counter()
        base = await self._on_disk(version, self._base)
        committed, replies = await self._write(version, step, base)
        if saved is not None:
            saved(version, replies)
        locator = committed.locator
        failpoint("weights.publish", Path(locator))
        if problem := await self._on_disk(version, lambda: _problem(lambda: self._weights.check(locator))):
            log.error("%s was damaged as it was written: %s; it is written again", locator, problem)
            committed, _ = await self._write(version, step, "", replace=locator)
        published = PublishedVersion(version, self._incarnation, locator, step, self._transport)
        if self._served:  # else the key has had this version since its step
            await self._version_key.set(published)
        self.newest = published
        self._in_use.add(version, locator)
        self._repairs = 0
        self._verified = False
        in_use = self._in_use.locators()
        removed = Removed()
        if not self._has_snapshots:
            removed = await self._on_disk(version, lambda: self._weights.prune(in_use))
        self._log_once(removed.problems)
        log.info(
            "published version %d (%s) in %.3f s, %.1f of %.1f MB written, pruned %d",
            version,
            locator.rpartition("/")[2],
            time.perf_counter() - start,
            committed.written / 1e6,
            committed.size / 1e6,
            len(removed.gone),
        )

    async def snapshot(self) -> tuple[int, str]:
        """Write the weights that the ranks have now for single requests; return the version, and its locator.

        The version in training stays the newest one, to which the new version refers.
        """
        await self.finish()
        assert self.newest is not None
        self._snapshots += 1
        version = self.newest.version + self._snapshots
        await self._workers.copy_weights(CopyWeightsRequest(ACTOR, version))
        base = await self._on_disk(version, self._base)
        committed, _ = await self._write(version, self.newest.step, base)
        return version, committed.locator

    async def keep_snapshots(self, locators: Sequence[str]) -> None:
        """Keep these snapshots, and delete the others but the newest; the version in training stays."""
        assert self.newest is not None
        in_use = [*self._in_use.locators(), *locators]
        removed = await self._on_disk(self.newest.version, lambda: self._weights.prune(in_use))
        self._log_once(removed.problems)

    def keep(self, versions: Sequence[int], pins: Iterable[PublishedVersion] = ()) -> None:
        """Keep from now on the versions in use, as the manager names them, all newer ones, and those of ``pins``."""
        self._in_use.keep(versions, pins)

    async def keep_pinned(self, pins: Mapping[str, PublishedVersion]) -> None:
        """Keep versions that were pinned before this trainer started. Logs an error for each that is gone."""
        self._in_use.keep([], pins.values())
        for name, held in pins.items():
            check = partial(self._weights.check, held.locator)
            if problem := await self._on_disk(held.version, partial(_problem, check)):
                log.error("version %d, pinned as %s: %s; its calls wait: pin it anew", held.version, name, problem)

    async def _write(
        self, version: int, step: int, base: str, *, replace: str = ""
    ) -> tuple[Committed, list[SaveWeightsReply]]:
        """Have every rank write its copy, and commit. Returns the version, and the ranks' replies.

        ``replace``: locator of the same version, which is damaged.
        """
        plan = await self._on_disk(version, lambda: self._weights.prepare(version, base))
        replies = await self._workers.save_weights(SaveWeightsRequest(ACTOR, version, plan))
        reports = [reply.report for reply in replies]
        failpoint("weights.manifest")
        self._version_key.check_alive()
        committed = await self._on_disk(
            version, lambda: self._weights.commit(version, step, plan, reports, replace=bool(replace))
        )
        if replace and committed.locator != replace:
            problem = f"it was committed again as {committed.locator}: a transport must keep the locator of a version"
            raise WeightsError(f"version {version} was published as {replace}, and {problem}")
        return committed, list(replies)

    async def repair(self, status: Mapping[str, Any]) -> None:
        """Verify the newest version if no server serves it, and write it again if it is damaged.

        ``status``: the manager's. Servers then try again. While a publication runs nothing is done: the
        ranks have no copy of the newest version any more, and the next one replaces it soon.

        Raises WeightsError when that does not help.
        """
        newest = self.newest
        if self._running is not None and not self._running.done():
            return
        if newest is None or self._verified or not unserved(status, newest.version):
            return
        problem = await self._problem_of_newest(newest)
        if not problem:
            self._verified = True  # the problem is with the servers
            return
        await self._rewrite(newest, problem)

    async def _problem_of_newest(self, newest: PublishedVersion) -> str:
        def verify() -> None:
            self._weights.verify(newest.locator, newest.version)

        return await on_disk(f"verifying {newest.locator}", self._timeout_s, lambda: _problem(verify))

    async def _rewrite(self, newest: PublishedVersion, problem: str) -> None:
        if self._repairs == MAX_REPAIRS:
            written = f"{newest.locator} was written {1 + MAX_REPAIRS} times"
            raise WeightsError(f"{written}, and is damaged: {problem}; check the disk")
        log.error("%s is damaged: %s; it is written again", newest.locator, problem)
        self._repairs += 1
        await self._write(newest.version, newest.step, "", replace=newest.locator)

    async def discard_unfinished(self) -> None:
        """Remove the unfinished versions of dead incarnations. Call it before the first publication."""
        self._version_key.check_alive()  # else this could delete the folder that a successor is writing
        removed = await on_disk(
            "removing unfinished weight versions", self._timeout_s, self._weights.discard_unfinished
        )
        for locator in removed.gone:
            log.info("removed %s, which was never completed", locator)
        self._log_once(removed.problems)

    def _base(self) -> str:
        """Return the locator of the version that the next one may refer to.

        It is "" before the first version, if that version is not written, and if it is damaged: everything is then
        written anew, and the next version refers to nothing of a damaged one.
        """
        if self.newest is None or not self.newest.locator:
            return ""
        locator = self.newest.locator
        if problem := _problem(lambda: self._weights.check(locator)):
            log.error("%s is damaged: %s; the next version is written whole", locator, problem)
            return ""
        return locator

    def _log_once(self, problems: Mapping[str, str]) -> None:
        """Log each problem once."""
        for locator in problems.keys() - self._logged:
            log.error("%s: %s", locator, problems[locator])
        self._logged = set(problems)

    async def export(self, target: Path) -> None:
        """Write the newest version to ``target`` as a plain HF directory, whole or not at all.

        Waits for the publication that runs. A damaged version is written again first, from the ranks'
        copies. Do not call it during ``begin``, nor without servers after a call of the next step that trains.
        """
        await self.finish()
        assert self.newest is not None, "nothing was published yet"
        self._version_key.check_alive()
        if not self.newest.locator:
            await self._workers.copy_weights(CopyWeightsRequest(ACTOR, self.newest.version))
            await self._write_next(self.newest.version, self.newest.step)
        target.parent.mkdir(parents=True, exist_ok=True)
        newest = self.newest
        what = f"writing {target}"

        def write() -> None:
            self._weights.export(newest.locator, newest.version, target)

        try:
            await on_disk(what, self._timeout_s, write)
        except WeightsError:
            problem = await self._problem_of_newest(newest)
            if not problem:
                raise  # the version is good: the target cannot be written
            await self._rewrite(newest, problem)
            await on_disk(what, self._timeout_s, write)

    async def _on_disk(self, version: int, work: Callable[[], Result]) -> Result:
        return await on_disk(f"publishing version {version}", self._timeout_s, work)


def unserved(status: Mapping[str, Any], version: int) -> bool:
    """Return True if servers have tried to load the newest version and none has it."""
    servers = status["servers"]
    tried = any(server["failures"] for server in servers)
    return tried and status["version"] == version and not any(server["version"] == version for server in servers)


def _problem(check: Callable[[], None]) -> str:
    """Return the reason why ``check`` refuses a version; "" if it does not."""
    try:
        check()
    except WeightsError as error:
        return str(error)
    return ""
