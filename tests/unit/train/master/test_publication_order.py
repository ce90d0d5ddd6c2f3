"""Publications that run while the caller trains: their order, their failures, and repairs in between."""

import asyncio
import random
from typing import Any

import msgspec
import pytest

from realsys.cluster.commit_folder import Removed
from realsys.cluster.names.contract import KeyMissing
from realsys.errors import WeightsError
from realsys.train.master.publish import Publisher, VersionKey
from realsys.train.requests import SaveWeightsReply
from realsys.types import PublishedVersion
from realsys.weights.contract import Committed
from tests.support.ledger.memory_store import MemoryNameStore
from tests.support.streams.weight_ranks import WeightRanks

FAILED = {"version": 0, "servers": [{"failures": 1, "version": None}]}


class Memory:
    """A transport without files. ``damaged``: locators of the versions that no server can load."""

    def __init__(self):
        self.damaged: set[str] = set()
        self.done: list[tuple[str, int]] = []

    def prepare(self, version, base):
        assert not base or base == f"v{version - 1}", "a version refers to the one before only"
        return base

    def commit(self, version, step, plan, reports, *, replace=False):
        assert reports == [version]
        self.done.append(("replace" if replace else "commit", version))
        self.damaged.discard(f"v{version}")
        return Committed(f"v{version}", 1, 1)

    def check(self, locator): ...

    def verify(self, locator, version):
        if locator in self.damaged:
            raise WeightsError("a bit has flipped")

    def prune(self, in_use):
        return Removed()


class Trial:
    """A publisher and one rank, which writes when ``release`` is called; at once if it does not ``hold``."""

    def __init__(self, *, holds=False):
        self.memory = Memory()
        self.store = MemoryNameStore()
        self.holds = holds
        self.failure = ""
        self.ranks = WeightRanks(self._save)
        self.publisher = Publisher(self.memory, self.ranks, VersionKey(self.store, "newest"), incarnation="1")  # type: ignore[arg-type]
        self._write = asyncio.Event()
        self.asked = asyncio.Event()

    async def _save(self, request):
        self.asked.set()
        if self.holds:
            await self._write.wait()
            self._write.clear()
        if self.failure:
            raise WeightsError(self.failure)
        return [SaveWeightsReply(request.version)]

    def release(self):
        self._write.set()

    def published(self):
        """The version that servers see."""
        try:
            return msgspec.json.decode(self.store.get("newest"), type=PublishedVersion).version
        except KeyMissing:
            return None


def test_second_publication_waits_for_the_first():
    async def body():
        trial = Trial(holds=True)
        await trial.publisher.begin(0, 0)
        second = asyncio.create_task(trial.publisher.begin(1, 1))
        await trial.asked.wait()
        assert trial.ranks.copied == [0] and not second.done() and trial.published() is None
        trial.release()
        assert (await second)["publish"] > 0
        assert trial.ranks.copied == [0, 1] and trial.published() == 0
        trial.release()
        await trial.publisher.finish()
        assert trial.published() == 1 and trial.memory.done == [("commit", 0), ("commit", 1)]

    asyncio.run(asyncio.wait_for(body(), 60))


def test_failed_write_is_raised_and_publishes_nothing():
    """To the watcher while the step runs, and to the caller who publishes next."""

    async def body():
        trial = Trial(holds=True)
        watching = asyncio.create_task(trial.publisher.watch())
        await trial.publisher.begin(0, 0)
        trial.release()
        await trial.publisher.finish()
        trial.failure = "cannot write v1: No space left on device"
        await trial.publisher.begin(1, 1)
        assert not watching.done()
        trial.release()
        with pytest.raises(WeightsError, match="No space left"):
            await watching
        with pytest.raises(WeightsError, match="No space left"):
            await trial.publisher.begin(2, 2)
        assert trial.published() == 0 and trial.ranks.copied == [0, 1]

    asyncio.run(asyncio.wait_for(body(), 60))


def test_version_is_not_repaired_beside_the_next():
    """The ranks have only the copy of the next version, which replaces the damaged one soon."""

    async def body():
        trial = Trial(holds=True)
        trial.release()
        await trial.publisher.publish(0, 0)
        trial.memory.damaged.add("v0")
        await trial.publisher.begin(1, 1)
        await trial.publisher.repair(FAILED)
        trial.release()
        await trial.publisher.finish()
        assert trial.memory.done == [("commit", 0), ("commit", 1)]

    asyncio.run(asyncio.wait_for(body(), 60))


def test_saved_gets_the_replies_of_the_ranks():
    async def body():
        trial, told = Trial(), list[tuple[int, list[Any]]]()
        await trial.publisher.begin(3, 3, lambda version, replies: told.append((version, replies)))
        await trial.publisher.finish()
        assert told == [(3, [SaveWeightsReply(3)])]

    asyncio.run(asyncio.wait_for(body(), 60))


def test_older_version_is_refused():
    async def body():
        trial = Trial()
        await trial.publisher.publish(4, 4)
        with pytest.raises(ValueError, match="version 4 does not follow 4"):
            await trial.publisher.begin(4, 4)
        assert trial.ranks.copied == [4]

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize("seed", range(40))
def test_random_runs_publish_in_order(seed):
    """Steps, damage, repairs and waits in a random order, on ranks that write after a random number of turns.

    Each version is published once, in order, and before the copy of the next is taken; a repair writes the
    version that servers see, from its own copy (``WeightRanks`` checks this).
    """
    asyncio.run(asyncio.wait_for(_random_run(random.Random(seed)), 60))


async def _random_run(rng):
    trial = Trial()
    save, publisher = trial.ranks.save, trial.publisher
    seen: list[int | None] = [None]

    async def slowly(request):
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        return await save(request)

    trial.ranks.save = slowly
    begun = -1
    for _ in range(30):
        match rng.choice(["begin", "damage", "repair", "finish", "turn"]):
            case "begin":
                begun += 1
                await publisher.begin(begun, begun)
                assert trial.published() == (begun - 1 if begun else None)
            case "damage" if trial.published() is not None:
                trial.memory.damaged.add(f"v{trial.published()}")
            case "repair":
                await publisher.repair({**FAILED, "version": trial.published()})
            case "finish":
                await publisher.finish()
                assert trial.published() == (begun if begun >= 0 else None)
            case _:
                await asyncio.sleep(0)
        if trial.published() != seen[-1]:
            seen.append(trial.published())
    await publisher.finish()
    first = [version for kind, version in trial.memory.done if kind == "commit"]
    assert first == list(range(begun + 1))
    assert seen[1:] == sorted(set(seen[1:]))  # type: ignore[type-var]
